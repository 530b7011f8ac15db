// dispatch: push each token's row to the ranks of its experts; lay out what arrives by expert.
//
// Every rank shows each peer the local slots and weights of its tokens, chunk by chunk, with the number of pairs per
// expert in each chunk. A receiver sums those numbers and knows the place of every row: no counts are exchanged, no
// place depends on a race. Rows wait in a staging area, one place for each (source, token), until their flag is up.
//
// Roles of a block's warps: ROUTE first shows chunks of own tokens, then places the pairs of chunks of all sources; PUSH
// sends rows; FAN copies own and arrived rows to their places. Work is taken by ticket. Who shows or pushes waits for
// nothing, who places waits for those, FAN for the placed, and nobody for FAN: even one block at a time gets through.
#pragma once
#include "bulk.cuh"

namespace moeloom {

constexpr int MAX_TOPK = 32;
constexpr int MAX_CHUNKS = 128;        // of one source
constexpr int MAX_CHUNK_PAIRS = 2048;  // tokens x top-k of one chunk
constexpr int MIN_CHUNK = 4;           // tokens: fewer chunks to sum up where tokens are few
constexpr int MAX_LOCAL = 512;         // experts of one rank
constexpr int MAX_EXPERTS = MAX_RANKS * MAX_LOCAL;
constexpr int WORD_COUNTS = 6;         // counts of 16 bits in a word of 16 bytes, beside its epoch
constexpr int PIECE = 7424;            // bytes of a row that a warp copies at a time: one FP8 row of 7168 with its scales
constexpr int NOWHERE = 0xffff;

#ifndef PUSH_W
#define PUSH_W 6
#endif
#ifndef FAN_W
#define FAN_W 12
#endif
constexpr int ROUTE_WARPS = 8, PUSH_WARPS = PUSH_W, FAN_WARPS = FAN_W, COPY_WARPS = PUSH_WARPS + FAN_WARPS;
constexpr int DISPATCH_THREADS = 32 * (ROUTE_WARPS + COPY_WARPS);
constexpr int ROUTERS = 32 * ROUTE_WARPS;

// What one source has at one receiver, in each of two banks: offsets in bytes from the receiver's symmetric memory.
struct DispatchSpace {
    i64 bank_bytes, source_bytes;  // strides
    i64 shown;    // of bank 0, source 0: a word, the number of tokens
    i64 counts;   // [MAX_CHUNKS] lines of count_words(num_local) words
    i64 pairs;    // a word for two pairs: 8 bytes a pair
    i64 places;   // 8 bytes a pair, written by the receiver itself
    i64 arrived;  // 4 bytes a token
    i64 staging;  // rows
};

struct DispatchParams {
    const char* x;
    const void* topk_idx;
    const float* topk_weights;
    const int* device_num_tokens;  // null: num_tokens
    const int* expert_rank;
    const int* expert_slot;
    char* const* peers;  // symmetric memory of every rank
    State* state;
    char* rows;
    int* row_pair;       // [capacity] (source * max_tokens + token) * topk + slot, or -1
    float* row_weight;   // [capacity]
    int* pair_row;       // [ranks, max_tokens, topk], or NOT_HERE, or NO_ROOM
    int* expert_start;   // [local + 1]
    int* expert_rows;    // [local]
    int* tokens_of_rank; // [ranks]
    int* problems;       // [4]: pairs without room; 1 + row, slot and value of the first wrong id, kept until read
    DispatchSpace space;
    i64 x_stride;
    i64 timeout_ns;
    int num_tokens, max_tokens, num_topk, num_experts, num_local, num_ranks, rank;  // num_local: the most of any rank
    int row_bytes, capacity, alignment, batched, ids_are_64;
};

struct DispatchShared {
    alignas(128) char stages[COPY_WARPS][PIECE];
    u64 full[COPY_WARPS];
    char* peers[MAX_RANKS];            // in this launch's bank
    u16 homes[MAX_EXPERTS];            // of each expert: rank * MAX_LOCAL + slot
    u32 left;                          // roles that need no more tickets
    int chunk, item;                   // tickets of ROUTE
    int tokens[MAX_RANKS];             // of each source
    int first[MAX_RANKS + 1];          // its first chunk, counted over all sources
    int shown[MAX_EXPERTS];            // pairs of each expert in the chunk that is being shown
    int count[MAX_LOCAL];              // rows of each local expert
    int start[MAX_LOCAL + 1];          // where they begin
    int before[MAX_LOCAL];             // rows of it from earlier chunks
    u16 slots[MAX_CHUNK_PAIRS];        // of the chunk that is being placed
    float weights[MAX_CHUNK_PAIRS];
};

__device__ __forceinline__ int chunk_tokens(int tokens) {  // even, so that two pairs share a word
    const int size = ((tokens + MAX_CHUNKS - 1) / MAX_CHUNKS + 1) / 2 * 2;
    return size < MIN_CHUNK ? MIN_CHUNK : size;
}

__device__ __forceinline__ int num_chunks(int tokens) {
    const int size = chunk_tokens(tokens);
    return (tokens + size - 1) / size;
}

__device__ __forceinline__ int count_words(int experts) { return (experts + WORD_COUNTS - 1) / WORD_COUNTS; }

__device__ __forceinline__ i64 read_id(const DispatchParams& p, i64 pair) {
    return p.ids_are_64 ? ((const i64*)p.topk_idx)[pair] : ((const int*)p.topk_idx)[pair];
}

__device__ __forceinline__ int own_tokens(const DispatchParams& p) {
    const int tokens = p.device_num_tokens ? *p.device_num_tokens : p.num_tokens;
    return min(max(tokens, 0), p.max_tokens);
}

// ---- ROUTE

__device__ __forceinline__ int checked_home(const DispatchParams& p, const DispatchShared& s, i64 pair) {
    const i64 id = read_id(p, pair);
    if (id >= 0 && id < p.num_experts) return s.homes[id];
    if (id != -1 && atomicCAS(&p.problems[1], 0, 1 + (int)(pair / p.num_topk)) == 0) {
        p.problems[2] = pair % p.num_topk;
        p.problems[3] = (int)max(min(id, (i64)0x7fffffff), -(i64)0x7fffffff);
    }
    return NOWHERE;
}

// Every word goes to every rank; those of several ranks are under way together, and nothing waits for them.
__device__ __forceinline__ void show_chunk(const DispatchParams& p, DispatchShared& s, u32 epoch, int chunk, int begin, int end) {
    const int thread = threadIdx.x, pairs = (end - begin) * p.num_topk;
    const i64 mine = p.rank * p.space.source_bytes, first = (i64)begin * p.num_topk;
    for (int i = thread; i < p.num_ranks * p.num_local; i += ROUTERS) s.shown[i] = 0;
    sync_threads(1, ROUTERS);
    for (int i = 2 * thread; i < pairs; i += 2 * ROUTERS) {
        u32 home[2] = {NOWHERE, NOWHERE};
        float weight[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (i + j >= pairs) continue;
            weight[j] = p.topk_weights[first + i + j];
            home[j] = checked_home(p, s, first + i + j);
            if (home[j] != NOWHERE) atomicAdd(&s.shown[home[j] / MAX_LOCAL * p.num_local + home[j] % MAX_LOCAL], 1);
        }
        for (int r = 0; r < p.num_ranks; ++r) {
            u32 slots = 0;
#pragma unroll
            for (int j = 0; j < 2; ++j) slots |= (home[j] / MAX_LOCAL == r ? home[j] % MAX_LOCAL : NOWHERE) << 16 * j;
            char* to = s.peers[r] + mine + p.space.pairs + (first + i) * 8;
            store_word(to, __float_as_uint(weight[0]), __float_as_uint(weight[1]), slots, epoch);
        }
    }
    sync_threads(1, ROUTERS);
    const int words = count_words(p.num_local);
    for (int i = thread; i < p.num_ranks * words; i += ROUTERS) {
        const int r = i / words, word = i % words;
        u32 packed[WORD_COUNTS / 2] = {};
#pragma unroll
        for (int j = 0; j < WORD_COUNTS; ++j) {
            const int e = word * WORD_COUNTS + j;
            if (e < p.num_local) packed[j / 2] |= (u32)s.shown[r * p.num_local + e] << 16 * (j % 2);
        }
        char* to = s.peers[r] + mine + p.space.counts + ((i64)chunk * words + word) * 16;
        store_word(to, packed[0], packed[1], packed[2], epoch);
    }
}

__device__ __forceinline__ void show_routing(const DispatchParams& p, DispatchShared& s, u32 epoch) {
    const int thread = threadIdx.x, tokens = own_tokens(p), size = chunk_tokens(tokens);
    const int chunks = max(num_chunks(tokens), 1);  // an idle rank shows that it is
    while (s.chunk < chunks) {
        const int chunk = s.chunk, begin = chunk * size;
        if (chunk == 0 && thread < p.num_ranks)
            store_word(s.peers[thread] + p.rank * p.space.source_bytes + p.space.shown, tokens, 0, 0, epoch);
        int next = 0;
        if (thread == 0) next = atomicAdd(&p.state->tickets[0].value, 1);
        show_chunk(p, s, epoch, chunk, min(begin, tokens), min(begin + size, tokens));
        sync_threads(1, ROUTERS);
        if (thread == 0) s.chunk = next;
        sync_threads(1, ROUTERS);
    }
}

// How many tokens each source has: sent before anything else, so it is there first.
__device__ __forceinline__ void await_tokens(const DispatchParams& p, DispatchShared& s, u32 epoch, u64 deadline) {
    const int source = threadIdx.x;
    if (source < p.num_ranks) {
        const char* at = s.peers[p.rank] + source * p.space.source_bytes + p.space.shown;
        Vector word;
        wait_while(p.state, deadline, 1, [&] { return (word = load_word(at)).w == epoch ? -1 : source; });
        s.tokens[source] = word.w == epoch ? (int)word.x : 0;
    }
    __syncwarp();
    if (source == 0) {
        s.first[0] = 0;
        for (int r = 0; r < p.num_ranks; ++r) s.first[r + 1] = s.first[r] + num_chunks(s.tokens[r]);
    }
    __syncwarp();
}

// Of each local expert: all of its rows, and how many come from the first `ahead` chunks.
__device__ __forceinline__ void sum_counts(const DispatchParams& p, DispatchShared& s, u32 epoch, u64 deadline, int ahead) {
    constexpr int BATCH = 4;  // words under way per thread
    const int thread = threadIdx.x, words = count_words(p.num_local), chunks = s.first[p.num_ranks];
    const int lines = ROUTERS / words, line = thread / words, word = thread % words;
    const char* from = s.peers[p.rank] + p.space.counts + word * 16;
    if (line >= lines) return;
    int total[WORD_COUNTS] = {}, before[WORD_COUNTS] = {};
    for (int begin = line; begin < chunks; begin += lines * BATCH) {
        Vector v[BATCH];
        wait_while(p.state, deadline, 1, [&] {
            int source[BATCH], missing = -1;
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int at = min(begin + j * lines, chunks - 1);
                source[j] = 0;
                for (int r = 1; r < p.num_ranks; ++r) source[j] += at >= s.first[r];
                v[j] = load_word(from + source[j] * p.space.source_bytes + (i64)(at - s.first[source[j]]) * words * 16);
            }
#pragma unroll
            for (int j = 0; j < BATCH; ++j)
                if (v[j].w != epoch) missing = source[j];
            return missing;
        });
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int at = begin + j * lines;
            if (at >= chunks || v[j].w != epoch) continue;
            const u32 packed[WORD_COUNTS / 2] = {v[j].x, v[j].y, v[j].z};
#pragma unroll
            for (int i = 0; i < WORD_COUNTS; ++i) {
                const int n = packed[i / 2] >> 16 * (i % 2) & 0xffff;
                total[i] += n;
                before[i] += at < ahead ? n : 0;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < WORD_COUNTS; ++i) {
        const int e = word * WORD_COUNTS + i;
        if (e >= p.num_local || total[i] == 0) continue;
        atomicAdd(&s.count[e], total[i]);
        atomicAdd(&s.before[e], before[i]);
    }
}

// By one warp: where each expert's rows begin, and how many of them there is room for. Returns how many there is not.
__device__ __forceinline__ int lay_out(const DispatchParams& p, DispatchShared& s) {
    const int lane = lane_id(), each = (p.num_local + 31) / 32, begin = min(lane * each, p.num_local);
    const int end = min(begin + each, p.num_local);
    auto room = [&](int rows) {
        return p.batched ? p.capacity / p.num_local : (rows + p.alignment - 1) / p.alignment * p.alignment;
    };
    int mine = 0, dropped = 0;
    for (int e = begin; e < end; ++e) mine += room(s.count[e]);
    int sum = mine;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    int start = sum - mine;
    for (int e = begin; e < end; ++e) {
        const int rows = s.count[e], size = room(rows), kept = max(0, min(rows, p.batched ? size : p.capacity - start));
        s.start[e] = min(start, p.capacity);
        s.count[e] = kept;
        dropped += rows - kept;
        start += size;
    }
    if (lane == 31) s.start[p.num_local] = min(start, p.capacity);
    return __reduce_add_sync(~0u, dropped);
}

// Rows that nobody fills have no pair: each item marks its share of them.
__device__ __forceinline__ void mark_padding(const DispatchParams& p, const DispatchShared& s, int item, int items, int thread, int threads) {
    auto mark = [&](int begin, int end) {
        for (int row = begin + thread; row < end; row += threads) {
            p.row_pair[row] = -1;
            p.row_weight[row] = 0.0f;
        }
    };
    for (int e = item; e < p.num_local; e += items) mark(s.start[e] + s.count[e], s.start[e + 1]);
    const int tail = s.start[p.num_local], share = (p.capacity - tail + items - 1) / items;
    const int begin = min(tail + item * share, p.capacity);
    mark(begin, min(begin + share, p.capacity));
}

// By one warp: the place of each pair of a chunk, by expert, then source, token and slot.
__device__ __forceinline__ void place_pairs(const DispatchParams& p, DispatchShared& s, u32 epoch, u64* places, i64 first_pair, int pairs) {
    const int lane = lane_id();
    for (int begin = 0; begin < pairs; begin += 32) {
        const int i = begin + lane, slot = i < pairs ? s.slots[i] : NOWHERE;
        const u32 same = __match_any_sync(~0u, slot);
        const int rank = __popc(same & ((1u << lane) - 1));
        int row = slot == NOWHERE ? NOT_HERE : NO_ROOM;
        if (slot != NOWHERE && s.before[slot] + rank < s.count[slot]) row = s.start[slot] + s.before[slot] + rank;
        __syncwarp();
        if (slot != NOWHERE && rank == 0) s.before[slot] += __popc(same);
        __syncwarp();
        if (i >= pairs) continue;
        store_number(places + i, row, epoch);
        p.pair_row[first_pair + i] = row;
        if (row < 0) continue;
        p.row_pair[row] = (int)first_pair + i;
        p.row_weight[row] = s.weights[i];
    }
}

__device__ __forceinline__ void place_item(const DispatchParams& p, DispatchShared& s, u32 epoch, u64 deadline, int item, int items) {
    const int thread = threadIdx.x;
    int source = p.rank, chunk = item, pairs = 0, ahead = s.first[p.num_ranks];  // own chunks first: their rows are here
    for (int i = 0; i < p.num_ranks; ++i) {
        const int chunks = s.first[source + 1] - s.first[source];
        if (chunk < chunks) break;
        chunk -= chunks;
        source = source + 1 == p.num_ranks ? 0 : source + 1;
    }
    char* from = s.peers[p.rank] + source * p.space.source_bytes;
    i64 begin = 0;
    if (item < s.first[p.num_ranks]) {  // or the item is there for padding only
        const int size = chunk_tokens(s.tokens[source]);
        begin = (i64)chunk * size * p.num_topk;
        pairs = min(size, s.tokens[source] - chunk * size) * p.num_topk;
        ahead = s.first[source] + chunk;
    }
    for (int e = thread; e < p.num_local; e += ROUTERS) s.count[e] = s.before[e] = 0;
    for (int i = 2 * thread; i < pairs; i += 2 * ROUTERS) {
        const char* at = from + p.space.pairs + (begin + i) * 8;
        Vector word;
        wait_while(p.state, deadline, 1, [&] { return (word = load_word(at)).w == epoch ? -1 : source; });
        const bool good = word.w == epoch;
        s.slots[i] = good ? word.z & 0xffff : NOWHERE;
        s.slots[i + 1] = good ? word.z >> 16 : NOWHERE;
        s.weights[i] = __uint_as_float(word.x);
        s.weights[i + 1] = __uint_as_float(word.y);
    }
    sync_threads(1, ROUTERS);
    MARK(4)
    sum_counts(p, s, epoch, deadline, ahead);
    sync_threads(1, ROUTERS);
    MARK(5)
    if (thread < 32) {
        const int dropped = lay_out(p, s);
        if (item == 0 && thread == 0) p.problems[0] = dropped;
    }
    sync_threads(1, ROUTERS);
    MARK(6)
    if (thread < 32) {
        place_pairs(p, s, epoch, (u64*)(from + p.space.places) + begin, (i64)source * p.max_tokens * p.num_topk + begin, pairs);
    MARK(7)
    } else {
        mark_padding(p, s, item, items, thread - 32, ROUTERS - 32);
        if (item == 0) {
            for (int e = thread - 32; e < p.num_local; e += ROUTERS - 32) p.expert_rows[e] = s.count[e];
            for (int e = thread - 32; e <= p.num_local; e += ROUTERS - 32) p.expert_start[e] = s.start[e];
            if (thread - 32 < p.num_ranks) p.tokens_of_rank[thread - 32] = s.tokens[thread - 32];
        }
    }
}

__device__ __forceinline__ void route(const DispatchParams& p, DispatchShared& s, u32 epoch, u64 deadline) {
    const int thread = threadIdx.x;
    show_routing(p, s, epoch);
    MARK(2)
    if (thread < 32) {
        await_tokens(p, s, epoch, deadline);
    MARK(3)
        arrive_threads(2, 32 * (1 + FAN_WARPS));
    }
    sync_threads(1, ROUTERS);
    const int items = max(s.first[p.num_ranks], (int)gridDim.x);  // every block takes part in marking the padding
    while (s.item < items) {
        const int item = s.item;
        int next = 0;
        if (thread == 0) next = atomicAdd(&p.state->tickets[2].value, 1);
        place_item(p, s, epoch, deadline, item, items);
        sync_threads(1, ROUTERS);
        if (thread == 0) s.item = next;
        sync_threads(1, ROUTERS);
    }
    if (thread == 0) leave(p.state, &s.left, 1 + COPY_WARPS, epoch);
}

// ---- PUSH and FAN: each warp has a stage in shared memory for one piece of a row.

struct Stage {
    char* data;
    u64* full;
    u32 phase;
};

// A row is read once, and written to the place that each lane has for it, null if none.
__device__ __forceinline__ void copy_row(Stage& stage, const char* from, int row_bytes, char* to, bool local) {
    for (int begin = 0; begin < row_bytes; begin += PIECE) {
        const int bytes = min(PIECE, row_bytes - begin);
        await_stores_read();  // of the piece before
        __syncwarp();
        if (lane_id() == 0) {
            announce(stage.full, bytes);
            bulk_load(stage.data, from + begin, bytes, stage.full);
        }
        await_bytes(stage.full, stage.phase);
        stage.phase ^= 1;
    MARK((local ? 19 : 14))
#ifdef HINT_OUT
        if (to && local) bulk_store(to + begin, stage.data, bytes, evict_first());
        else
#endif
        if (to) bulk_store(to + begin, stage.data, bytes);
    }
}

__device__ __forceinline__ void push_rows(const DispatchParams& p, DispatchShared& s, Stage stage, u32 epoch, u32 drawn) {
    const int lane = lane_id(), tokens = own_tokens(p);
    for (int token = ticket(drawn); token < tokens; token = ticket(drawn)) {
        drawn = draw(p.state->tickets[1]);
    MARK(10)
        const i64 id = lane < p.num_topk ? read_id(p, (i64)token * p.num_topk + lane) : -1;
        const int rank = id >= 0 && id < p.num_experts ? s.homes[id] / MAX_LOCAL : -1;
    MARK(11)
        const u32 same = __match_any_sync(~0u, rank);
        const bool first = rank >= 0 && rank != p.rank && lane == __ffs(same) - 1;  // one row for each peer
        if (!__any_sync(~0u, first)) continue;
        char* to = first ? s.peers[rank] + p.rank * p.space.source_bytes : nullptr;
#ifndef NO_PUSH_COPY
        copy_row(stage, p.x + token * p.x_stride, p.row_bytes, first ? to + p.space.staging + (i64)token * p.row_bytes : nullptr, false);
#endif
        if (!first) continue;
        await_stores();
    MARK(12)
        store_release((u32*)(to + p.space.arrived) + token, epoch);
    MARK(13)
    }
    if (lane == 0) leave(p.state, &s.left, 1 + COPY_WARPS, epoch);
}

__device__ __forceinline__ void fan_out(const DispatchParams& p, DispatchShared& s, Stage stage, u32 epoch, u64 deadline, u32 drawn) {
    const int lane = lane_id(), others = p.num_ranks - 1;
    sync_threads(2, 32 * (1 + FAN_WARPS));  // s.tokens
    const int own = s.tokens[p.rank];
    MARK(15)
    int most = 0;
    for (int r = 0; r < p.num_ranks; ++r)
        if (r != p.rank) most = max(most, s.tokens[r]);
    const int units = own + most * others;
    for (int unit = ticket(drawn); unit < units; unit = ticket(drawn)) {
        drawn = draw(p.state->tickets[3]);
        int source = p.rank, token = unit;  // own rows are here; those of others come side by side
        if (unit >= own) {
            token = (unit - own) / others;
            source = (p.rank + 1 + (unit - own) % others) % p.num_ranks;
        }
        if (token >= s.tokens[source]) continue;
        const char* from = s.peers[p.rank] + source * p.space.source_bytes;
        int row = -1;
        if (lane < p.num_topk) {
            const u64* place = (const u64*)(from + p.space.places) + (i64)token * p.num_topk + lane;
            u64 value;
            wait_while(p.state, deadline, 1, [&] { return (value = load_number(place)) >> 32 == epoch ? -1 : source; });
            if (value >> 32 == epoch) row = (int)(u32)value;
        }
        __syncwarp();
    MARK(16)
        if (!__any_sync(~0u, row >= 0)) continue;
        const char* data = p.x + token * p.x_stride;
        if (source != p.rank) {
            data = from + p.space.staging + (i64)token * p.row_bytes;
            const u32* flag = (const u32*)(from + p.space.arrived) + token;
            if (lane == 0) {
                wait_while(p.state, deadline, 2, [&] { return load_acquire(flag) == epoch ? -1 : source; });
                fence_before_load();
            }
    MARK(17)
            __syncwarp();
        }
#ifndef NO_FAN_COPY
        copy_row(stage, data, p.row_bytes, row >= 0 ? p.rows + (i64)row * p.row_bytes : nullptr, true);
    MARK(18)
#endif
    }
    if (lane == 0) leave(p.state, &s.left, 1 + COPY_WARPS, epoch);
}

__device__ __forceinline__ void run_dispatch(const DispatchParams& p) {
    extern __shared__ __align__(128) char shared[];
    DispatchShared& s = *(DispatchShared*)shared;
    const int thread = threadIdx.x, warp = thread / 32;
    const u32 epoch = *(volatile u32*)&p.state->epoch + 1;
    const u64 deadline = nanoseconds() + p.timeout_ns;
    MARK(0)
    u32 drawn = 0;
    Stage stage{};
    if (warp < ROUTE_WARPS) {
        if (thread == 0) s.chunk = atomicAdd(&p.state->tickets[0].value, 1);
        if (thread == 32) s.item = atomicAdd(&p.state->tickets[2].value, 1);
    } else {
        drawn = draw(p.state->tickets[warp < ROUTE_WARPS + PUSH_WARPS ? 1 : 3]);
        stage = {s.stages[warp - ROUTE_WARPS], &s.full[warp - ROUTE_WARPS], 0};
        if (lane_id() == 0) init_barrier(stage.full);
    }
    if (thread == 0) s.left = 0;
    if (thread < p.num_ranks) s.peers[thread] = p.peers[thread] + (epoch & 1) * p.space.bank_bytes;
    for (int e = thread; e < p.num_experts; e += DISPATCH_THREADS) s.homes[e] = p.expert_rank[e] * MAX_LOCAL + p.expert_slot[e];
    __syncthreads();
    MARK(1)
    if (warp < ROUTE_WARPS)
        route(p, s, epoch, deadline);
    else if (warp < ROUTE_WARPS + PUSH_WARPS)
        push_rows(p, s, stage, epoch, drawn);
    else
        fan_out(p, s, stage, epoch, deadline, drawn);
    MARK(20)
    await_stores_read();  // shared memory lasts as long as the block
    MARK(21)
}

__global__ void __launch_bounds__(DISPATCH_THREADS, 1) dispatch(const __grid_constant__ DispatchParams p) { run_dispatch(p); }

// Several ranks on one GPU, for tests.
__global__ void __launch_bounds__(DISPATCH_THREADS, 1) dispatch_virtual(const DispatchParams* p) { run_dispatch(p[blockIdx.y]); }

}  // namespace moeloom
