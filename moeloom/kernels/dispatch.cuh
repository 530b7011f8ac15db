// dispatch: push each token's row to the ranks of its experts; lay out what arrives by expert.
//
// Every rank shows each peer the local slots and weights of its tokens, chunk by chunk, with the number of pairs per
// expert in each chunk. A receiver sums those numbers and knows the place of every row: no counts are exchanged, no
// place depends on a race. Rows wait in a staging area, one place for each (source, token), until their flag is up.
//
// Roles of a block's warps: META shows the routing, PUSH sends rows (both take chunks of own tokens by ticket and wait
// for nothing), FAN takes chunks of all sources by ticket and waits for their senders. So even one block at a time
// gets through.
#pragma once
#include "signals.cuh"

namespace moeloom {

constexpr int MAX_TOPK = 32;
constexpr int MAX_CHUNKS = 128;       // of one source
constexpr int MAX_CHUNK_PAIRS = 2048; // tokens x top-k of one chunk
constexpr int MIN_CHUNK = 4;          // tokens: fewer chunks to sum up where tokens are few
constexpr int MAX_LOCAL = 512;        // experts of one rank
constexpr int META_WARPS = 2, PUSH_WARPS = 6, FAN_WARPS = 16;
constexpr int DISPATCH_THREADS = 32 * (META_WARPS + PUSH_WARPS + FAN_WARPS);
constexpr int SENDERS = 32 * (META_WARPS + PUSH_WARPS), FANNERS = 32 * FAN_WARPS;

// What one source has at one receiver, in each of two banks: offsets in bytes from the receiver's symmetric memory.
struct DispatchSpace {
    i64 bank_bytes, source_bytes;                             // strides
    i64 counts, slots, weights, shown, arrived, staging;      // of bank 0, source 0
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
    int num_tokens, max_tokens, num_topk, num_experts, num_local, num_ranks, rank;
    int row_bytes, capacity, alignment, batched, ids_are_64;
};

__device__ __forceinline__ i64 read_id(const DispatchParams& p, i64 pair) {
    return p.ids_are_64 ? ((const i64*)p.topk_idx)[pair] : ((const int*)p.topk_idx)[pair];
}

__device__ __forceinline__ int chunk_tokens(int tokens) {
    int size = (tokens + MAX_CHUNKS - 1) / MAX_CHUNKS;
    return size < MIN_CHUNK ? MIN_CHUNK : size;
}

__device__ __forceinline__ int num_chunks(int tokens) {
    int size = chunk_tokens(tokens);
    return (tokens + size - 1) / size;
}

struct SenderShared {
    int ticket;
    int slots[MAX_CHUNK_PAIRS];
    int ranks[MAX_CHUNK_PAIRS];
    int counts[MAX_LOCAL];
};

struct FanShared {
    int ticket;
    int tokens[64];            // of each source
    int first[65];             // its first chunk, counted over all sources
    int count[MAX_LOCAL];      // rows of each expert
    int start[MAX_LOCAL + 1];  // where they begin
    int before[MAX_LOCAL];     // rows of it from earlier chunks
    int rows[MAX_CHUNK_PAIRS];
};

// A warp copies one row to the place that each lane of `wanted` holds; four loads of 16 bytes a lane are under way.
__device__ __forceinline__ void copy_row(const char* from, int row_bytes, u32 wanted, char* place) {
    constexpr int DEPTH = 4;
    const int vectors = row_bytes / 16;
    for (int begin = 0; begin < vectors; begin += 32 * DEPTH) {
        Vector v[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            const int at = begin + i * 32 + lane_id();
            if (at < vectors) v[i] = load_row((const Vector*)from + at);
        }
        for (u32 left = wanted; left; left &= left - 1) {
            Vector* to = (Vector*)__shfl_sync(~0u, (u64)place, __ffs(left) - 1);
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) {
                const int at = begin + i * 32 + lane_id();
                if (at < vectors) store_row(to + at, v[i]);
            }
        }
    }
}

__device__ void show_chunk(const DispatchParams& p, SenderShared& s, u32 epoch, int tokens, int chunk, int begin, int end) {
    const int thread = threadIdx.x, pairs = (end - begin) * p.num_topk;
    const i64 bank = (epoch & 1) * p.space.bank_bytes + p.rank * p.space.source_bytes;
    for (int r = 0; r < p.num_ranks; ++r) {
        char* to = p.peers[r] + bank;
        for (int e = thread; e < p.num_local; e += 32 * META_WARPS) s.counts[e] = 0;
        sync_threads(2, 32 * META_WARPS);
        int* slots = (int*)(to + p.space.slots) + (i64)begin * p.num_topk;
        float* weights = (float*)(to + p.space.weights) + (i64)begin * p.num_topk;
        for (int i = thread; i < pairs; i += 32 * META_WARPS) {
            const bool mine = s.ranks[i] == r;
            slots[i] = mine ? s.slots[i] : -1;
            weights[i] = p.topk_weights[(i64)begin * p.num_topk + i];
            if (mine) atomicAdd(&s.counts[s.slots[i]], 1);
        }
        sync_threads(2, 32 * META_WARPS);
        int* counts = (int*)(to + p.space.counts) + (i64)chunk * p.num_local;
        for (int e = thread; e < p.num_local; e += 32 * META_WARPS) counts[e] = s.counts[e];
        sync_threads(2, 32 * META_WARPS);
        if (thread == 0) store_release((u64*)(to + p.space.shown) + chunk, ((u64)epoch << 32) | (u32)tokens);
    }
}

__device__ void push_chunk(const DispatchParams& p, SenderShared& s, u32 epoch, int begin, int end) {
    const int warp = threadIdx.x / 32 - META_WARPS, lane = lane_id();
    const i64 bank = (epoch & 1) * p.space.bank_bytes + p.rank * p.space.source_bytes;
    for (int token = begin + warp; token < end; token += PUSH_WARPS) {
        const int* ranks = s.ranks + (token - begin) * p.num_topk;
        // lane k holds the rank of slot k if it is a peer and no earlier slot has it
        int rank = lane < p.num_topk ? ranks[lane] : -1;
        for (int k = 0; k < lane && k < p.num_topk; ++k)
            if (ranks[k] == rank) rank = -1;
        if (rank == p.rank) rank = -1;
        const u32 wanted = __ballot_sync(~0u, rank >= 0);
        if (!wanted) continue;
        char* to = rank < 0 ? nullptr : p.peers[rank] + bank;
        char* row = rank < 0 ? nullptr : to + p.space.staging + (i64)token * p.row_bytes;
        copy_row(p.x + token * p.x_stride, p.row_bytes, wanted, row);
        __syncwarp();
        if (rank >= 0) store_release((u32*)(to + p.space.arrived) + token, epoch);
    }
}

__device__ void send(const DispatchParams& p, SenderShared& s, u32 epoch) {
    const int thread = threadIdx.x;
    int tokens = p.device_num_tokens ? *p.device_num_tokens : p.num_tokens;
    tokens = min(max(tokens, 0), p.max_tokens);
    const int size = chunk_tokens(tokens), chunks = max(num_chunks(tokens), 1);  // an idle rank shows that it is
    while (true) {
        sync_threads(1, SENDERS);
        if (thread == 0) s.ticket = atomicAdd(&p.state->tickets[0], 1);
        sync_threads(1, SENDERS);
        const int chunk = s.ticket;
        if (chunk >= chunks) return;
        const int begin = min(chunk * size, tokens), end = min(begin + size, tokens);
        for (int i = thread; i < (end - begin) * p.num_topk; i += SENDERS) {
            const i64 pair = (i64)begin * p.num_topk + i, id = read_id(p, pair);
            const bool routed = id >= 0 && id < p.num_experts;
            s.ranks[i] = routed ? p.expert_rank[id] : -1;
            s.slots[i] = routed ? p.expert_slot[id] : -1;
            if (!routed && id != -1 && atomicCAS(&p.problems[1], 0, 1 + (int)(pair / p.num_topk)) == 0) {
                p.problems[2] = pair % p.num_topk;
                p.problems[3] = (int)max(min(id, (i64)0x7fffffff), -(i64)0x7fffffff);
            }
        }
        sync_threads(1, SENDERS);
        if (thread < 32 * META_WARPS)
            show_chunk(p, s, epoch, tokens, chunk, begin, end);
        else
            push_chunk(p, s, epoch, begin, end);
    }
}

// Waits until every source has shown all of its chunks.
__device__ void await_routing(const DispatchParams& p, FanShared& s, u32 epoch, u64 deadline) {
    const int thread = threadIdx.x - SENDERS;
    const char* mine = p.peers[p.rank] + (epoch & 1) * p.space.bank_bytes;
    auto shown = [&](int source, int chunk) {
        const u64* word = (const u64*)(mine + source * p.space.source_bytes + p.space.shown) + chunk;
        u64 value = 0;
        wait_until(p.state, deadline, 1, source, [&] { return ((value = load_acquire(word)) >> 32) == epoch; });
        return (value >> 32) == epoch ? (int)(u32)value : 0;
    };
    for (int source = thread; source < p.num_ranks; source += FANNERS) s.tokens[source] = shown(source, 0);
    sync_threads(3, FANNERS);
    for (int i = thread; i < p.num_ranks * MAX_CHUNKS; i += FANNERS) {
        const int source = i / MAX_CHUNKS, chunk = i % MAX_CHUNKS;
        if (chunk < num_chunks(s.tokens[source])) shown(source, chunk);
    }
    if (thread == 0) {
        int chunks = 0;
        for (int source = 0; source < p.num_ranks; ++source) {
            s.first[source] = chunks;
            chunks += num_chunks(s.tokens[source]);
        }
        s.first[p.num_ranks] = chunks;
    }
    sync_threads(3, FANNERS);
}

// Of each expert: where its rows begin, and how many come from chunks before `item`.
__device__ void sum_counts(const DispatchParams& p, FanShared& s, u32 epoch, int item) {
    const int thread = threadIdx.x - SENDERS;
    const char* mine = p.peers[p.rank] + (epoch & 1) * p.space.bank_bytes;
    for (int e = thread; e < p.num_local; e += FANNERS) s.count[e] = s.before[e] = 0;
    sync_threads(3, FANNERS);
    const int columns = min(p.num_local, FANNERS), lines = FANNERS / columns, line = thread / columns;
    if (line < lines) {
        for (int e = thread % columns; e < p.num_local; e += columns) {
            int total = 0, before = 0;
            for (int source = 0; source < p.num_ranks; ++source) {
                const int* counts = (const int*)(mine + source * p.space.source_bytes + p.space.counts);
                const int first = s.first[source], chunks = s.first[source + 1] - first;
#pragma unroll 4
                for (int chunk = line; chunk < chunks; chunk += lines) {
                    const int n = counts[(i64)chunk * p.num_local + e];
                    total += n;
                    before += first + chunk < item ? n : 0;
                }
            }
            atomicAdd(&s.count[e], total);
            atomicAdd(&s.before[e], before);
        }
    }
    sync_threads(3, FANNERS);
    if (thread < 32) {  // exclusive prefix sum of what each expert takes up
        int start = 0, dropped = 0;
        for (int begin = 0; begin < p.num_local; begin += 32) {
            const int e = begin + thread, n = e < p.num_local ? s.count[e] : 0;
            const int room = p.batched ? p.capacity / p.num_local : (n + p.alignment - 1) / p.alignment * p.alignment;
            int sum = e < p.num_local ? room : 0;
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(~0u, sum, step);
                if (thread >= step) sum += other;
            }
            if (e < p.num_local) {
                const int first = start + sum - room;
                const int kept = max(0, min(n, (p.batched ? room : p.capacity - first)));
                s.start[e] = min(first, p.capacity);
                s.count[e] = kept;
                dropped += n - kept;
            }
            start += __shfl_sync(~0u, sum, 31);
        }
        if (thread == 0) s.start[p.num_local] = min(start, p.capacity);
        dropped = __reduce_add_sync(~0u, dropped);
        if (item == 0 && thread == 0) p.problems[0] = dropped;
    }
    sync_threads(3, FANNERS);
    if (item > 0) return;
    for (int e = thread; e < p.num_local; e += FANNERS) p.expert_rows[e] = s.count[e];
    for (int e = thread; e <= p.num_local; e += FANNERS) p.expert_start[e] = s.start[e];
}

// Rows that nobody fills have no pair.
__device__ void mark_padding(const DispatchParams& p, FanShared& s, int item, int items) {
    const int thread = threadIdx.x - SENDERS;
    for (int e = item; e <= p.num_local; e += items) {
        const bool tail = e == p.num_local;
        const int begin = s.start[e] + (tail ? 0 : s.count[e]), end = tail ? p.capacity : s.start[e + 1];
        for (int row = begin + thread; row < end; row += FANNERS) {
            p.row_pair[row] = -1;
            p.row_weight[row] = 0.0f;
        }
    }
}

// The place of each pair of a chunk: by expert, then source, token and slot.
__device__ void place_pairs(const DispatchParams& p, FanShared& s, const int* slots, int pairs, int* pair_row) {
    if (threadIdx.x - SENDERS >= 32) return;
    const int lane = lane_id();
    for (int begin = 0; begin < pairs; begin += 32) {
        const int i = begin + lane, slot = i < pairs ? slots[i] : -1;
        const u32 same = __match_any_sync(~0u, slot);
        const int rank = __popc(same & ((1u << lane) - 1));
        int row = slot < 0 ? NOT_HERE : NO_ROOM;
        if (slot >= 0 && s.before[slot] + rank < s.count[slot]) row = s.start[slot] + s.before[slot] + rank;
        __syncwarp();
        if (slot >= 0 && rank == 0) s.before[slot] += __popc(same);
        __syncwarp();
        if (i < pairs) s.rows[i] = pair_row[i] = row;
    }
}

__device__ void fan_out(const DispatchParams& p, FanShared& s, u32 epoch, u64 deadline) {
    const int thread = threadIdx.x - SENDERS, warp = thread / 32, lane = lane_id();
    const char* mine = p.peers[p.rank] + (epoch & 1) * p.space.bank_bytes;
    await_routing(p, s, epoch, deadline);
    const int items = max(s.first[p.num_ranks], 1);
    while (true) {
        sync_threads(3, FANNERS);
        if (thread == 0) s.ticket = atomicAdd(&p.state->tickets[1], 1);
        sync_threads(3, FANNERS);
        const int item = s.ticket;
        if (item >= items) return;
        sum_counts(p, s, epoch, item);
        if (item == 0 && thread < p.num_ranks) p.tokens_of_rank[thread] = s.tokens[thread];
        mark_padding(p, s, item, items);
        int source = 0;
        while (source < p.num_ranks && s.first[source + 1] <= item) ++source;
        if (source == p.num_ranks) return;  // no tokens at all
        const int size = chunk_tokens(s.tokens[source]), begin = (item - s.first[source]) * size;
        const int end = min(begin + size, s.tokens[source]);
        const char* from = mine + source * p.space.source_bytes;
        const int* slots = (const int*)(from + p.space.slots) + (i64)begin * p.num_topk;
        const float* weights = (const float*)(from + p.space.weights) + (i64)begin * p.num_topk;
        const i64 first_pair = ((i64)source * p.max_tokens + begin) * p.num_topk;
        place_pairs(p, s, slots, (end - begin) * p.num_topk, p.pair_row + first_pair);
        sync_threads(3, FANNERS);
        for (int token = begin + warp; token < end; token += FAN_WARPS) {
            const int i = (token - begin) * p.num_topk + lane;
            const int row = lane < p.num_topk ? s.rows[i] : -1;
            if (row >= 0) {
                p.row_pair[row] = (int)first_pair + i;
                p.row_weight[row] = weights[i];
            }
            const u32 wanted = __ballot_sync(~0u, row >= 0);
            if (!wanted) continue;
            const char* data = p.x + token * p.x_stride;
            if (source != p.rank) {
                data = from + p.space.staging + (i64)token * p.row_bytes;
                const u32* flag = (const u32*)(from + p.space.arrived) + token;
                if (lane == 0) wait_until(p.state, deadline, 2, source, [&] { return load_acquire(flag) == epoch; });
                __syncwarp();
            }
            copy_row(data, p.row_bytes, wanted, p.rows + (i64)row * p.row_bytes);
        }
    }
}

__global__ void __launch_bounds__(DISPATCH_THREADS, 1) dispatch(const DispatchParams* params) {
    const DispatchParams& p = params[blockIdx.y];
    __shared__ SenderShared sender;
    __shared__ FanShared fan;
    const u32 epoch = *(volatile u32*)&p.state->epoch + 1;
    const u64 deadline = nanoseconds() + p.timeout_ns;
    if (threadIdx.x < SENDERS)
        send(p, sender, epoch);
    else
        fan_out(p, fan, epoch, deadline);
    end_launch(p.state, epoch, gridDim.x);
}

}  // namespace moeloom
