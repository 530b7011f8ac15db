// combine: sum each token's rows on the rank that has them, push the sum to the token's own rank, and sum there.
//
// A unit of work is a part of one token's row. Warps of role SEND take units of other ranks' tokens by ticket and wait
// for nothing; warps of role SUM take units of own tokens and wait for the sums of peers. So even one block at a time
// gets through. Sums are fp32, in slot order on a rank and in rank order over ranks; a single term passes unchanged.
#pragma once
#include "signals.cuh"

namespace moeloom {

constexpr int COMBINE_WARPS = 16, COMBINE_THREADS = 32 * COMBINE_WARPS;
constexpr int GROUP = 8;  // slots whose rows are loaded together

// What one rank has sent to another, in each of two banks: offsets in bytes from the receiver's symmetric memory.
struct CombineSpace {
    i64 bank_bytes, sender_bytes;  // strides
    i64 arrived, sums;             // of bank 0, sender 0
};

struct CombineParams {
    const char* rows;
    const int* pair_row;        // [ranks, max_tokens, topk] of dispatch
    const float* row_weight;    // [rows], or null: rows are weighted already
    const int* tokens_of_rank;  // [ranks]
    const void* topk_idx;       // of own tokens
    const int* expert_rank;
    char* const* peers;
    State* state;
    char* y;
    CombineSpace space;
    i64 timeout_ns;
    int max_tokens, num_topk, num_experts, num_ranks, rank, row_bytes, parts, ids_are_64;
};

struct Floats {
    float v[8];
};

__device__ __forceinline__ Floats widen(Vector b) {
    Floats f;
    const u32 words[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        f.v[2 * i] = __uint_as_float(words[i] << 16);
        f.v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
    return f;
}

__device__ __forceinline__ Vector round_bf16(const Floats& f) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(f.v[2 * i + 1]), "f"(f.v[2 * i]));
    return {words[0], words[1], words[2], words[3]};
}

// Adds a term, or begins with it: never added to zero, so -0 stays -0.
__device__ __forceinline__ void add(Floats& sum, const Floats& term, bool first) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum.v[i] = first ? term.v[i] : __fadd_rn(sum.v[i], term.v[i]);
}

// The sum of a token's local rows at one vector; lane k holds the row of slot k, negative if none. Rounded as it travels.
__device__ __forceinline__ Vector sum_rows(const CombineParams& p, int row, float weight, int vector) {
    Floats sum;
    Vector only = {0, 0, 0, 0};
    int terms = 0;
    for (int begin = 0; begin < p.num_topk; begin += GROUP) {
        Vector loaded[GROUP];
        int at[GROUP];
#pragma unroll
        for (int k = 0; k < GROUP; ++k) {
            at[k] = begin + k < p.num_topk ? __shfl_sync(~0u, row, begin + k) : NOT_HERE;
            if (at[k] >= 0) loaded[k] = load_row((const Vector*)(p.rows + (i64)at[k] * p.row_bytes) + vector);
        }
#pragma unroll
        for (int k = 0; k < GROUP; ++k) {
            const float scale = __shfl_sync(~0u, weight, (begin + k) & 31);
            if (at[k] < 0) continue;
            Floats term = widen(loaded[k]);
            if (p.row_weight)
#pragma unroll
                for (int i = 0; i < 8; ++i) term.v[i] = __fmul_rn(term.v[i], scale);
            add(sum, term, terms == 0);
            only = loaded[k];
            ++terms;
        }
    }
    return terms == 0 || (terms == 1 && !p.row_weight) ? only : round_bf16(sum);
}

struct Unit {
    int begin, end;  // vectors of the token's row
    int row;         // lane k: local row of slot k, NOT_HERE or NO_ROOM
    float weight;
};

__device__ __forceinline__ Unit unit_of(const CombineParams& p, int source, int token, int part) {
    const int lane = lane_id(), vectors = p.row_bytes / 16, size = (vectors + p.parts - 1) / p.parts;
    Unit unit{part * size, min((part + 1) * size, vectors), NOT_HERE, 0.0f};
    if (lane < p.num_topk) unit.row = p.pair_row[((i64)source * p.max_tokens + token) * p.num_topk + lane];
    if (p.row_weight && unit.row >= 0) unit.weight = p.row_weight[unit.row];
    return unit;
}

__device__ __forceinline__ int ticket(u32* counter) {
    u32 mine = 0;
    if (lane_id() == 0) mine = atomicAdd(counter, 1);
    return __shfl_sync(~0u, mine, 0);
}

__device__ void send_sums(const CombineParams& p, u32 epoch) {
    const int others = p.num_ranks - 1;
    int most = 0;
    for (int r = 0; r < p.num_ranks; ++r)
        if (r != p.rank) most = max(most, p.tokens_of_rank[r]);
    const int units = most * others * p.parts;
    for (int u = ticket(&p.state->tickets[0]); u < units;) {
        const int next = ticket(&p.state->tickets[0]);  // under way while this unit is summed
        const int part = u % p.parts, source = (p.rank + 1 + u / p.parts % others) % p.num_ranks;
        const int token = u / p.parts / others;
        u = next;
        if (token >= p.tokens_of_rank[source]) continue;
        const Unit unit = unit_of(p, source, token, part);
        if (!__any_sync(~0u, unit.row != NOT_HERE)) continue;  // the token's rank does not wait for it
        char* to = p.peers[source] + (epoch & 1) * p.space.bank_bytes + p.rank * p.space.sender_bytes;
        Vector* sums = (Vector*)(to + p.space.sums + (i64)token * p.row_bytes);
        for (int begin = unit.begin; begin < unit.end; begin += 32) {
            const int vector = begin + lane_id();
            const Vector sum = sum_rows(p, unit.row, unit.weight, min(vector, unit.end - 1));
            if (vector < unit.end) store_row(sums + vector, sum);
        }
        __syncwarp();
        const bool some = __any_sync(~0u, unit.row >= 0);  // or none had room
        u32* flag = (u32*)(to + p.space.arrived) + (i64)token * p.parts + part;
        if (lane_id() == 0) store_release(flag, epoch << 1 | some);
    }
}

__device__ void sum_up(const CombineParams& p, u32 epoch, u64 deadline) {
    const int lane = lane_id(), units = p.tokens_of_rank[p.rank] * p.parts;
    const char* mine = p.peers[p.rank] + (epoch & 1) * p.space.bank_bytes;
    for (int u = ticket(&p.state->tickets[1]); u < units;) {
        const int next = ticket(&p.state->tickets[1]);
        const int token = u / p.parts, part = u % p.parts;
        u = next;
        const Unit unit = unit_of(p, p.rank, token, part);
        int rank = -1;  // lane k: the rank that serves slot k
        if (lane < p.num_topk) {
            const i64 pair = (i64)token * p.num_topk + lane;
            const i64 id = p.ids_are_64 ? ((const i64*)p.topk_idx)[pair] : ((const int*)p.topk_idx)[pair];
            if (id >= 0 && id < p.num_experts) rank = p.expert_rank[id];
        }
        if (rank == p.rank && unit.row < 0) rank = -1;  // dropped for want of room
        const u64 bit = rank >= 0 ? 1ull << rank : 0;
        u64 ranks = (u64)__reduce_or_sync(~0u, (u32)(bit >> 32)) << 32 | __reduce_or_sync(~0u, (u32)bit);
        for (u64 left = ranks & ~(1ull << p.rank); left; left &= left - 1) {
            const int from = __ffsll(left) - 1;
            const u32* flag = (const u32*)(mine + from * p.space.sender_bytes + p.space.arrived);
            flag += (i64)token * p.parts + part;
            u32 value = 0;
            wait_until(p.state, deadline, 3, from, [&] { return (value = load_acquire(flag)) >> 1 == epoch; });
            if (value == epoch << 1) ranks &= ~(1ull << from);  // it had no room for any
        }
        Vector* y = (Vector*)(p.y + (i64)token * p.row_bytes);
        for (int begin = unit.begin; begin < unit.end; begin += 32) {
            const int vector = min(begin + lane, unit.end - 1);
            Vector only = {0, 0, 0, 0};
            Floats sum;
            int terms = 0;
            for (u64 left = ranks; left; left &= left - 1, ++terms) {
                const int from = __ffsll(left) - 1;
                const char* sums = mine + from * p.space.sender_bytes + p.space.sums + (i64)token * p.row_bytes;
                only = from == p.rank ? sum_rows(p, unit.row, unit.weight, vector) : load_row((const Vector*)sums + vector);
                add(sum, widen(only), terms == 0);
            }
            if (begin + lane < unit.end) store_row(y + vector, terms > 1 ? round_bf16(sum) : only);
        }
    }
}

__global__ void __launch_bounds__(COMBINE_THREADS, 1) combine(const CombineParams* params) {
    const CombineParams& p = params[blockIdx.y];
    const u32 epoch = *(volatile u32*)&p.state->epoch + 1;
    const u64 deadline = nanoseconds() + p.timeout_ns;
    if (p.num_ranks > 1 && threadIdx.x / 32 % 2 == 0) send_sums(p, epoch);
    sum_up(p, epoch, deadline);
    end_launch(p.state, epoch, gridDim.x);
}

}  // namespace moeloom
