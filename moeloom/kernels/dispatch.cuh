// dispatch: push each token's row to the ranks of its experts; lay out what arrives by expert.
//
// Every rank shows each peer the local slots and weights of its tokens, chunk by chunk, with the number of pairs per
// expert in each chunk. A receiver sums those numbers and knows the place of every row: no counts are exchanged, no
// place depends on a race. Rows wait in a staging area, one place for each (source, token), until their flag is up.
//
// Roles of a block's warps: ROUTE first shows chunks of own tokens, then places the pairs of chunks of all sources; PUSH
// sends own rows and copies them to their local places; FAN copies what arrives. Work is taken by ticket. Showing waits
// for nothing, placing for what is shown, PUSH for its places, FAN for its places and rows, and nobody for FAN: even one
// block at a time gets through.
//
// Loops with a count known at run time are not unrolled: the first run through cold code costs more than it saves.
#pragma once
#include "bulk.cuh"

namespace moeloom {

constexpr int MAX_TOPK = 32;
constexpr int MAX_CHUNKS = 64;         // of one source
constexpr int MAX_CHUNK_PAIRS = 4096;  // tokens x top-k of one chunk
constexpr int MIN_CHUNK = 8;           // tokens: fewer chunks to sum up where tokens are few
constexpr int MAX_LOCAL = 512;         // experts of one rank
constexpr int MAX_EXPERTS = MAX_RANKS * MAX_LOCAL;
constexpr int WORD_COUNTS = 6;         // counts of 16 bits in a word of 16 bytes, beside its epoch
constexpr int PIECE = 7424;            // bytes of a row that a warp copies at a time: one FP8 row of 7168 with its scales
constexpr int NOWHERE = 0xffff;
constexpr u64 ROUTE_AHEAD_NS = 100'000'000;

constexpr int ROUTE_WARPS = 8, PUSH_WARPS = 6, FAN_WARPS = 6, COPY_WARPS = PUSH_WARPS + FAN_WARPS;
constexpr int DISPATCH_THREADS = 32 * (ROUTE_WARPS + COPY_WARPS);
constexpr int ROUTERS = 32 * ROUTE_WARPS;
constexpr int COUNTERS = ROUTERS - 32;  // of them: while these sum up the counts, the last warp takes in the pairs

// What one source has at one receiver, in each of two banks: offsets in bytes from the receiver's symmetric memory.
struct DispatchSpace {
    i64 bank_bytes, source_bytes;  // strides
    i64 shown;    // of bank 0, source 0: 8 bytes, the number of tokens
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
    int* problems;       // [4], perhaps of the host: pairs without room, added up over launches that have any; 1 + row,
                         // slot and low half of a wrong id, the first that is met once the host has set 1 + row to 0
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
    u16 earlier[MAX_CHUNK_PAIRS];      // pairs of the same expert in the warp's stretch of it
    u16 seen[ROUTE_WARPS][MAX_LOCAL];  // all of the stretch
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

// One of a launch at most, and not over one that the host has yet to see.
__device__ __forceinline__ void report_id(const DispatchParams& p, u32 epoch, i64 id, int pair) {
    volatile int* found = p.problems + 1;
    if (atomicExch(&p.state->wrong_ids, epoch) == epoch || found[0]) return;
    found[1] = pair % p.num_topk;
    found[2] = (int)id;
    __threadfence_system();
    found[0] = 1 + pair / p.num_topk;
}

__device__ __forceinline__ int checked_home(const DispatchParams& p, const DispatchShared& s, u32 epoch, i64 id,
                                            i64 pair) {
    if (id >= 0 && id < p.num_experts) return s.homes[id];
    if (id != -1) report_id(p, epoch, id, (int)pair);
    return NOWHERE;
}

// Two pairs of one thread, which share a word.
struct TwoPairs {
    i64 id[2];
    float weight[2];
};

// Of a chunk whose pairs are [first, first + pairs).
__device__ __forceinline__ TwoPairs read_pairs(const DispatchParams& p, i64 first, int i, int pairs) {
    TwoPairs two;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        two.id[j] = i + j < pairs ? read_id(p, first + i + j) : -1;
        two.weight[j] = i + j < pairs ? p.topk_weights[first + i + j] : 0.0f;
    }
    return two;
}

// Every word goes to every rank: those of several ranks are under way together, and nothing waits for them.
__device__ __forceinline__ void show_chunk(const DispatchParams& p, DispatchShared& s, u32 epoch, int chunk, i64 first,
                                           int pairs, TwoPairs two) {
    const int thread = threadIdx.x;
    const i64 mine = p.rank * p.space.source_bytes;
#pragma unroll 1
    for (int i = thread; i < p.num_ranks * p.num_local; i += ROUTERS) s.shown[i] = 0;
    sync_threads(1, ROUTERS);
#pragma unroll 1
    for (int i = 2 * thread; i < pairs; i += 2 * ROUTERS) {
        if (i != 2 * thread) two = read_pairs(p, first, i, pairs);
        u32 home[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            home[j] = checked_home(p, s, epoch, two.id[j], first + i + j);
            if (home[j] != NOWHERE) atomicAdd(&s.shown[home[j] / MAX_LOCAL * p.num_local + home[j] % MAX_LOCAL], 1);
        }
#pragma unroll 1
        for (int r = 0; r < p.num_ranks; ++r) {
            u32 slots = 0;
#pragma unroll
            for (int j = 0; j < 2; ++j) slots |= (home[j] / MAX_LOCAL == r ? home[j] % MAX_LOCAL : NOWHERE) << 16 * j;
            char* to = s.peers[r] + mine + p.space.pairs + (first + i) * 8;
            store_word(to, __float_as_uint(two.weight[0]), __float_as_uint(two.weight[1]), slots, epoch);
        }
    }
    sync_threads(1, ROUTERS);
    const int words = count_words(p.num_local);
#pragma unroll 1
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

// Own tokens in chunks.
struct Chunks {
    int tokens, size, count;
};

__device__ __forceinline__ Chunks own_chunks(const DispatchParams& p) {
    const int tokens = own_tokens(p);
    return {tokens, chunk_tokens(tokens), max(num_chunks(tokens), 1)};  // an idle rank shows that it is
}

__device__ __forceinline__ TwoPairs first_pairs(const DispatchParams& p, const Chunks& own, int chunk) {
    const int pairs = min(own.size, own.tokens - chunk * own.size) * p.num_topk;
    return read_pairs(p, (i64)chunk * own.size * p.num_topk, 2 * threadIdx.x, pairs);
}

__device__ __forceinline__ void show_routing(const DispatchParams& p, DispatchShared& s, u32 epoch, const Chunks& own,
                                             TwoPairs two) {
    const int thread = threadIdx.x;
    while (s.chunk < own.count) {
        const int chunk = s.chunk, pairs = min(own.size, own.tokens - chunk * own.size) * p.num_topk;
        if (chunk == 0 && thread < p.num_ranks)
            store_number(s.peers[thread] + p.rank * p.space.source_bytes + p.space.shown, own.tokens, epoch);
        int next = 0;
        if (thread == 0) next = atomicAdd(&p.state->tickets[0].value, 1);
        show_chunk(p, s, epoch, chunk, (i64)chunk * own.size * p.num_topk, pairs, two);
        sync_threads(1, ROUTERS);
        if (thread == 0) s.chunk = next;
        sync_threads(1, ROUTERS);
        two = first_pairs(p, own, s.chunk);
    }
}

// How many tokens each source has: sent before anything else, so it is there first.
__device__ __forceinline__ void await_tokens(const DispatchParams& p, DispatchShared& s, u32 epoch, u64 deadline) {
    const int source = threadIdx.x;
    if (source < p.num_ranks) {
        const char* at = s.peers[p.rank] + source * p.space.source_bytes + p.space.shown;
        u64 number;
        wait_while(p.state, deadline, 1, [&] { return is_of(number = load_number(at), epoch) ? -1 : source; });
        s.tokens[source] = is_of(number, epoch) ? (int)(u32)number : 0;
    }
    __syncwarp();
    if (source == 0) {
        s.first[0] = 0;
#pragma unroll 1
        for (int r = 0; r < p.num_ranks; ++r) s.first[r + 1] = s.first[r] + num_chunks(s.tokens[r]);
    }
    __syncwarp();
}

// Of each local expert: all of its rows, and how many come from the first `ahead` chunks.
__device__ __forceinline__ void sum_counts(const DispatchParams& p, DispatchShared& s, u32 epoch, u64 deadline, int ahead) {
    constexpr int BATCH = 4;  // words under way per thread
    const int thread = threadIdx.x, words = count_words(p.num_local), chunks = s.first[p.num_ranks];
    const int lines = COUNTERS / words, line = thread / words, word = thread % words;
    const char* from = s.peers[p.rank] + p.space.counts + word * 16;
    if (line >= lines) return;
    int total[WORD_COUNTS] = {}, before[WORD_COUNTS] = {};
#pragma unroll 1
    for (int begin = line; begin < chunks; begin += lines * BATCH) {
        Vector v[BATCH];
        wait_while(p.state, deadline, 1, [&] {
            int source[BATCH], missing = -1;
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int at = min(begin + j * lines, chunks - 1);
                source[j] = 0;
#pragma unroll 1
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

// Which slot and weight each pair of the chunk has.
__device__ __forceinline__ void take_pairs(const DispatchParams& p, DispatchShared& s, u32 epoch, u64 deadline,
                                           const char* from, int source, int pairs) {
    constexpr int BATCH = 4;  // words under way per lane
#pragma unroll 1
    for (int begin = 2 * lane_id(); begin < pairs; begin += 64 * BATCH) {
        Vector v[BATCH];
        wait_while(p.state, deadline, 1, [&] {
            int missing = -1;
#pragma unroll
            for (int j = 0; j < BATCH; ++j) v[j] = load_word(from + min(begin + 64 * j, (pairs - 1) / 2 * 2) * 8);
#pragma unroll
            for (int j = 0; j < BATCH; ++j)
                if (v[j].w != epoch) missing = source;
            return missing;
        });
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int i = begin + 64 * j;
            if (i >= pairs) continue;
            const bool good = v[j].w == epoch;
            s.slots[i] = good ? v[j].z & 0xffff : NOWHERE;
            s.slots[i + 1] = good ? v[j].z >> 16 : NOWHERE;
            s.weights[i] = __uint_as_float(v[j].x);
            s.weights[i + 1] = __uint_as_float(v[j].y);
        }
    }
}

// By one warp: where each expert's rows begin, and how many of them there is room for. Returns how many there is not.
__device__ __forceinline__ int lay_out(const DispatchParams& p, DispatchShared& s) {
    const int lane = lane_id(), each = (p.num_local + 31) / 32, begin = min(lane * each, p.num_local);
    const int end = min(begin + each, p.num_local);
    const int each_has = p.batched ? p.capacity / p.num_local : 0;
    const bool is_power = (p.alignment & (p.alignment - 1)) == 0;
    auto room = [&](int rows) {
        const int most = rows + p.alignment - 1;
        return p.batched ? each_has : is_power ? most & -p.alignment : most / p.alignment * p.alignment;
    };
    int mine = 0, dropped = 0;
#pragma unroll 1
    for (int e = begin; e < end; ++e) mine += room(s.count[e]);
    int sum = mine;
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    int start = sum - mine;
#pragma unroll 1
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
__device__ __forceinline__ void mark_padding(const DispatchParams& p, const DispatchShared& s, int item, int items) {
    auto mark = [&](int begin, int end) {
#pragma unroll 1
        for (int row = begin + threadIdx.x; row < end; row += ROUTERS) {
            p.row_pair[row] = -1;
            p.row_weight[row] = 0.0f;
        }
    };
#pragma unroll 1
    for (int e = item; e < p.num_local; e += items) mark(s.start[e] + s.count[e], s.start[e + 1]);
    const int tail = s.start[p.num_local], share = (p.capacity - tail + items - 1) / items;
    const int begin = min(tail + item * share, p.capacity);
    mark(begin, min(begin + share, p.capacity));
}

// How many earlier pairs of the chunk go to the same expert: each warp counts in its own stretch of the chunk.
__device__ __forceinline__ void count_earlier(DispatchShared& s, int stretch, int pairs) {
    const int lane = lane_id(), warp = threadIdx.x / 32, end = min((warp + 1) * stretch, pairs);
#pragma unroll 1
    for (int begin = warp * stretch; begin < end; begin += 32) {
        const int i = begin + lane, slot = i < end ? s.slots[i] : NOWHERE;
        const u32 same = __match_any_sync(~0u, slot);
        const int rank = __popc(same & ((1u << lane) - 1));
        int earlier = 0;
        if (slot != NOWHERE) earlier = s.seen[warp][slot];
        __syncwarp();
        if (slot != NOWHERE && rank == 0) s.seen[warp][slot] = earlier + __popc(same);
        if (i < end) s.earlier[i] = earlier + rank;
        __syncwarp();
    }
}

// The place of each pair of a chunk: by expert, then source, token and slot.
__device__ __forceinline__ void place_pairs(const DispatchParams& p, DispatchShared& s, u32 epoch, char* places,
                                            i64 first_pair, int stretch, int pairs) {
#pragma unroll 1
    for (int i = threadIdx.x; i < pairs; i += ROUTERS) {
        const int slot = s.slots[i];
        int row = NOT_HERE;
        if (slot != NOWHERE) {
            int earlier = s.before[slot] + s.earlier[i];
#pragma unroll 1
            for (int warp = 0; warp < i / stretch; ++warp) earlier += s.seen[warp][slot];
            row = earlier < s.count[slot] ? s.start[slot] + earlier : NO_ROOM;
        }
        store_number(places + i * 8, row, epoch);
        p.pair_row[first_pair + i] = row;
        if (row < 0) continue;
        p.row_pair[row] = (int)first_pair + i;
        p.row_weight[row] = s.weights[i];
    }
}

__device__ __forceinline__ void clear_counts(const DispatchParams& p, DispatchShared& s) {
#pragma unroll 1
    for (int e = threadIdx.x; e < p.num_local; e += ROUTERS) {
        s.count[e] = s.before[e] = 0;
#pragma unroll 1
        for (int warp = 0; warp < ROUTE_WARPS; ++warp) s.seen[warp][e] = 0;
    }
}

__device__ __forceinline__ void place_item(const DispatchParams& p, DispatchShared& s, u32 epoch, u64 deadline, int item,
                                           int items) {
    const int thread = threadIdx.x;
    int source = p.rank, chunk = item, pairs = 0, ahead = s.first[p.num_ranks];  // own chunks first: their rows are here
#pragma unroll 1
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
    const int stretch = (pairs + ROUTERS - 1) / ROUTERS * 32;  // of each warp
    if (thread < COUNTERS)
        sum_counts(p, s, epoch, deadline, ahead);
    else
        take_pairs(p, s, epoch, deadline, from + p.space.pairs + begin * 8, source, pairs);
    sync_threads(1, ROUTERS);
    if (thread >= COUNTERS) {
        const int dropped = lay_out(p, s);
        volatile int* all_dropped = p.problems;
        if (item == 0 && dropped > 0 && thread == COUNTERS) *all_dropped = *all_dropped + dropped;
    }
    count_earlier(s, stretch, pairs);
    sync_threads(1, ROUTERS);
    const i64 first_pair = (i64)source * p.max_tokens * p.num_topk + begin;
    place_pairs(p, s, epoch, from + p.space.places + begin * 8, first_pair, stretch, pairs);
    mark_padding(p, s, item, items);
    if (item > 0) return;
#pragma unroll 1
    for (int e = thread; e < p.num_local; e += ROUTERS) p.expert_rows[e] = s.count[e];
#pragma unroll 1
    for (int e = thread; e <= p.num_local; e += ROUTERS) p.expert_start[e] = s.start[e];
    if (thread < p.num_ranks) p.tokens_of_rank[thread] = s.tokens[thread];
}

__device__ __forceinline__ void route(const DispatchParams& p, DispatchShared& s, const Chunks& own, const TwoPairs& two,
                                      u32 epoch, u64 deadline) {
    const int thread = threadIdx.x;
    show_routing(p, s, epoch, own, two);
    clear_counts(p, s);
    if (thread < 32) {
        await_tokens(p, s, epoch, deadline);
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
        clear_counts(p, s);
        sync_threads(1, ROUTERS);
    }
    if (thread == 0) leave(p.state, &s.left, 1 + COPY_WARPS, epoch);
}

// ---- PUSH and FAN. Each warp has a stage in shared memory for one piece of a row.

struct Stage {
    char* data;
    u64* full;
    u32 phase;
};

// By one lane, into a stage that is free.
__device__ __forceinline__ void begin_load(const Stage& stage, const char* from, int bytes) {
    announce(stage.full, bytes);
    bulk_load(stage.data, from, bytes, stage.full);
}

// Once the stores of what the stage holds have read it.
__device__ __forceinline__ void load_piece(const Stage& stage, const char* from, int bytes) {
    await_stores_read();
    __syncwarp();
    if (lane_id() == 0) begin_load(stage, from, bytes);
}

__device__ __forceinline__ void await_piece(Stage& stage) {
    await_bytes(stage.full, stage.phase);
    stage.phase ^= 1;
}

// To the place that each lane has for the row, null if none: a local one, or one in the staging area of a peer, who reads
// it again at once. `there`: the stage holds the first piece already.
__device__ __forceinline__ void copy_row(Stage& stage, const char* from, int row_bytes, char* to, bool there,
                                         bool local = true) {
#pragma unroll 1
    for (int begin = 0; begin < row_bytes; begin += PIECE) {
        const int bytes = min(PIECE, row_bytes - begin);
        if (begin > 0 || !there) {
            load_piece(stage, from + begin, bytes);
            await_piece(stage);
        }
        if (to && local) bulk_store_streaming(to + begin, stage.data, bytes);
        if (to && !local) bulk_store(to + begin, stage.data, bytes);
    }
}

// Few units go to as many blocks as there are: a block's later warps draw only if there is work for all blocks' earlier.
__device__ __forceinline__ u32 first_draw(Counter& counter, int warp, int units) {
    return warp > 0 && warp * (int)gridDim.x >= units ? units : draw(counter);
}

// The local row of lane k's slot of a token, negative if none. Between two looks, meanwhile().
template <class Meanwhile>
__device__ __forceinline__ int await_place(const DispatchParams& p, const DispatchShared& s, u32 epoch, u64 deadline,
                                           int source, int token, Meanwhile meanwhile) {
    const int lane = lane_id();
    if (lane >= p.num_topk) return NOT_HERE;
    const char* place = s.peers[p.rank] + source * p.space.source_bytes + p.space.places;
    place += ((i64)token * p.num_topk + lane) * 8;
    u64 number;
    const u64 late = deadline + ROUTE_AHEAD_NS;  // ROUTE knows which peer is missing, and says so first
    wait_while(p.state, late, 1, [&] {
        number = load_number(place);
        meanwhile();
        return is_of(number, epoch) ? -1 : source;
    }, false);
    return is_of(number, epoch) ? (int)(u32)number : NOT_HERE;
}

// A token of PUSH; lane k: the expert of its slot k.
struct Drawn {
    int token;
    i64 id;
};

__device__ __forceinline__ Drawn draw_token(const DispatchParams& p, int tokens, u32 drawn) {
    const int token = ticket(drawn), lane = lane_id();
    return {token, token < tokens && lane < p.num_topk ? read_id(p, (i64)token * p.num_topk + lane) : -1};
}

__device__ __forceinline__ void push_rows(const DispatchParams& p, DispatchShared& s, Stage stage, Drawn now, u32 epoch,
                                          u64 deadline) {
    const int lane = lane_id(), tokens = own_tokens(p);
#pragma unroll 1
    while (now.token < tokens) {
        const u32 drawn = draw(p.state->tickets[1]);
        const int token = now.token, rank = now.id >= 0 && now.id < p.num_experts ? s.homes[now.id] / MAX_LOCAL : -1;
        const u32 same = __match_any_sync(~0u, rank);
        const bool first = rank >= 0 && rank != p.rank && lane == __ffs(same) - 1;  // one row for each peer
        const bool sends = __any_sync(~0u, first), stays = __any_sync(~0u, rank == p.rank);
        const char* x = p.x + token * p.x_stride;
        if (sends || stays) {
            load_piece(stage, x, min(PIECE, p.row_bytes));
            await_piece(stage);
        }
        if (sends) {
            char* to = first ? s.peers[rank] + p.rank * p.space.source_bytes : nullptr;
            char* row = first ? to + p.space.staging + (i64)token * p.row_bytes : nullptr;
            copy_row(stage, x, p.row_bytes, row, true, false);
            if (first) {
                await_stores();
                store_release((u32*)(to + p.space.arrived) + token, epoch);
            }
        }
        if (stays) {
            const int row = await_place(p, s, epoch, deadline, p.rank, token, [] {});
            char* to = row >= 0 ? p.rows + (i64)row * p.row_bytes : nullptr;
            if (__any_sync(~0u, row >= 0)) copy_row(stage, x, p.row_bytes, to, !sends || p.row_bytes <= PIECE);
        }
        now = draw_token(p, tokens, drawn);
    }
    if (lane == 0) leave(p.state, &s.left, 1 + COPY_WARPS, epoch);
}

__device__ __forceinline__ void fan_out(const DispatchParams& p, DispatchShared& s, Stage stage, u32 epoch, u64 deadline) {
    const int lane = lane_id(), others = p.num_ranks - 1, warp = threadIdx.x / 32 - ROUTE_WARPS - PUSH_WARPS;
    u32 drawn = warp == 0 ? draw(p.state->tickets[3]) : 0;
    sync_threads(2, 32 * (1 + FAN_WARPS));  // s.tokens
    int most = 0;
#pragma unroll 1
    for (int r = 0; r < p.num_ranks; ++r)
        if (r != p.rank) most = max(most, s.tokens[r]);
    const int units = most * others, piece = min(PIECE, p.row_bytes);
    if (warp > 0) drawn = first_draw(p.state->tickets[3], warp, units);
    bool stage_is_free = true;
#pragma unroll 1
    for (int unit = ticket(drawn); unit < units; unit = ticket(drawn)) {
        drawn = draw(p.state->tickets[3]);
        const int token = unit / others;  // rows of several sources come side by side
        const int source = (p.rank + 1 + unit % others) % p.num_ranks;
        if (token >= s.tokens[source]) continue;
        const char* from = s.peers[p.rank] + source * p.space.source_bytes;
        const u32* flag = (const u32*)(from + p.space.arrived) + token;
        const char* staged = from + p.space.staging + (i64)token * p.row_bytes;
        bool coming = false;
        auto load = [&] {
            fence_before_load();
            begin_load(stage, staged, piece);
            coming = true;
        };
        const int row = await_place(p, s, epoch, deadline, source, token, [&] {  // the first may come before its places
            if (stage_is_free && lane == 0 && !coming && load_acquire(flag) == epoch) load();
        });
        const bool stays = __any_sync(~0u, row >= 0);
        if (!__shfl_sync(~0u, coming, 0)) {
            if (!stays) continue;
            if (lane == 0) wait_while(p.state, deadline, 2, [&] { return load_acquire(flag) == epoch ? -1 : source; });
            await_stores_read();
            __syncwarp();
            if (lane == 0) load();
        }
        stage_is_free = false;
        await_piece(stage);
        char* to = row >= 0 ? p.rows + (i64)row * p.row_bytes : nullptr;
        if (stays) copy_row(stage, staged, p.row_bytes, to, true);
    }
    if (lane == 0) leave(p.state, &s.left, 1 + COPY_WARPS, epoch);
}

// Asks for what the launch will read first before it is known which block will read it.
__device__ __forceinline__ void prefetch(const DispatchParams& p) {
    if (threadIdx.x < DISPATCH_THREADS - 32) return;
    const i64 pairs = (i64)p.num_tokens * p.num_topk, line = ((i64)blockIdx.x * 32 + lane_id()) * 128;
    if (line < pairs * (p.ids_are_64 ? 8 : 4)) prefetch_line((const char*)p.topk_idx + line);
    if (line < pairs * 4) prefetch_line((const char*)p.topk_weights + line);
    if (lane_id() == 0 && blockIdx.x < p.num_tokens) prefetch_bytes(p.x + blockIdx.x * p.x_stride, p.row_bytes);
}

__device__ __forceinline__ void run_dispatch(const DispatchParams& p) {
    extern __shared__ __align__(128) char shared[];
    DispatchShared& s = *(DispatchShared*)shared;
    const int thread = threadIdx.x, warp = thread / 32;
    const u32 epoch = *(volatile u32*)&p.state->epoch + 1;
    const u64 deadline = nanoseconds() + p.timeout_ns;
    const bool routes = warp < ROUTE_WARPS, pushes = !routes && warp < ROUTE_WARPS + PUSH_WARPS;
    Stage stage{};
    Drawn pushed{};
    Chunks own{};
    TwoPairs two{};
    u32 drawn = 0;
    if (thread == 0) s.chunk = atomicAdd(&p.state->tickets[0].value, 1);
    if (thread == 32) s.item = atomicAdd(&p.state->tickets[2].value, 1);
    if (pushes) drawn = first_draw(p.state->tickets[1], warp - ROUTE_WARPS, own_tokens(p));
    if (!routes) {
        stage = {s.stages[warp - ROUTE_WARPS], &s.full[warp - ROUTE_WARPS], 0};
        if (lane_id() == 0) init_barrier(stage.full);
    }
    prefetch(p);
    if (thread == 0) s.left = 0;
    if (thread < p.num_ranks) s.peers[thread] = p.peers[thread] + (epoch & 1) * p.space.bank_bytes;
#pragma unroll 1
    for (int e = thread - ROUTERS; !routes && e < p.num_experts; e += DISPATCH_THREADS - ROUTERS)
        s.homes[e] = p.expert_rank[e] * MAX_LOCAL + p.expert_slot[e];
    if (routes) {
        own = own_chunks(p);
        sync_threads(1, ROUTERS);  // s.chunk
        two = first_pairs(p, own, s.chunk);
    }
    if (pushes) {  // nobody waits for its first tokens
        arrive_threads(3, DISPATCH_THREADS);
        pushed = draw_token(p, own_tokens(p), drawn);
        sync_threads(4, DISPATCH_THREADS);
    } else {
        arrive_threads(4, DISPATCH_THREADS);
        sync_threads(3, DISPATCH_THREADS);
    }
    if (routes)
        route(p, s, own, two, epoch, deadline);
    else if (pushes)
        push_rows(p, s, stage, pushed, epoch, deadline);
    else
        fan_out(p, s, stage, epoch, deadline);
    await_stores_read();  // shared memory lasts as long as the block
}

__global__ void __launch_bounds__(DISPATCH_THREADS, 1) dispatch(const __grid_constant__ DispatchParams p) {
    run_dispatch(p);
}

}  // namespace moeloom
