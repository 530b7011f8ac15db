// combine: sum each token's rows on the rank that has them, push the sum to the token's own rank, and sum there.
//
// A unit of work is a part of one token's row. Warps of role SEND take units of other ranks' tokens by ticket and wait
// for nothing; warps of role SUM take units of own tokens and wait for the sums of peers. So even one block at a time
// gets through. Sums are fp32, in slot order on a rank and in rank order over ranks; a single term passes unchanged.
//
// Each warp has a stage in shared memory. The copy engine brings a piece of every row of the token there at once: that
// keeps enough bytes under way without registers. What goes to a peer leaves from the stage as well.
#pragma once
#include "bulk.cuh"

namespace moeloom {

constexpr int COMBINE_WARPS = 16, COMBINE_THREADS = 32 * COMBINE_WARPS;
constexpr int SEND_WARPS = 8;  // of them; the rest is SUM from the start
constexpr int COMBINE_STAGE = 196608 / COMBINE_WARPS / 16;  // vectors of each warp

// What one rank has sent to another, in each of two banks: offsets in bytes from the receiver's symmetric memory.
struct CombineSpace {
    i64 bank_bytes, sender_bytes;  // strides
    i64 begun;    // of bank 0, sender 0: a number that says that the sender has begun this launch
    i64 arrived;  // 4 bytes for each part of a token
    i64 sums;     // rows
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

struct CombineShared {
    Vector stages[COMBINE_WARPS][COMBINE_STAGE];
    float weights[COMBINE_WARPS][32];
    u64 full[COMBINE_WARPS];
    char* peers[MAX_RANKS];  // in this launch's bank
    int tokens[MAX_RANKS];
    u32 left;
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

// A warp's part of a token: which local rows it has, and its stage.
struct Unit {
    Vector* stage;
    float* weights;  // of the local rows, in slot order, in shared memory; null: 1
    u64* full;
    int row;         // lane k: local row of slot k, NOT_HERE or NO_ROOM
    int place;       // lane k: how many local rows come before it
    int rows;        // local ones
    int begin, end;  // vectors of the token's row
};

__device__ __forceinline__ Unit take(const CombineParams& p, CombineShared& s, int source, int token, int part) {
    const int lane = lane_id(), warp = threadIdx.x / 32;
    const int vectors = p.row_bytes / 16, size = (vectors + p.parts - 1) / p.parts;
    Unit u{s.stages[warp], p.row_weight ? s.weights[warp] : nullptr, &s.full[warp], NOT_HERE};
    u.begin = min(part * size, vectors);
    u.end = min(u.begin + size, vectors);
    if (lane < p.num_topk) u.row = p.pair_row[((i64)source * p.max_tokens + token) * p.num_topk + lane];
    const u32 local = __ballot_sync(~0u, u.row >= 0);
    u.rows = __popc(local);
    u.place = __popc(local & ((1u << lane) - 1));
    if (p.row_weight && u.row >= 0) u.weights[u.place] = p.row_weight[u.row];
    __syncwarp();
    return u;
}

// Vectors of each of `rows` rows that the stage holds: whole trips of a warp, if it can.
__device__ __forceinline__ int piece_of(int rows) {
    const int size = COMBINE_STAGE / max(rows, 1);
    return size < 32 ? size : size / 32 * 32;
}

// Brings a piece of each local row into the stage, one after the other.
__device__ __forceinline__ void load_rows(const CombineParams& p, const Unit& u, int begin, int size) {
    const char* row = p.rows + (i64)u.row * p.row_bytes;
    if (u.row >= 0) bulk_load(u.stage + u.place * size, row + begin * 16, size * 16, u.full);
}

// The sum of a token's local rows at one vector of the piece, rounded as it travels.
__device__ __forceinline__ Vector sum_rows(const Unit& u, int size, int vector) {
    constexpr int GROUP = 4;
    Floats sum;
    Vector loaded[GROUP] = {};
#pragma unroll 1
    for (int begin = 0; begin < u.rows; begin += GROUP) {
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
            if (begin + i < u.rows) loaded[i] = u.stage[(begin + i) * size + vector];
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            if (begin + i >= u.rows) continue;
            Floats term = widen(loaded[i]);
            if (u.weights) {
                const float scale = u.weights[begin + i];
#pragma unroll
                for (int k = 0; k < 8; ++k) term.v[k] = __fmul_rn(term.v[k], scale);
            }
            add(sum, term, begin + i == 0);
        }
    }
    return u.rows == 1 && !u.weights ? loaded[0] : round_bf16(sum);
}

__device__ __forceinline__ void send_sums(const CombineParams& p, CombineShared& s, u32 epoch, u32 drawn, u32& phase) {
    const int lane = lane_id(), others = p.num_ranks - 1;
    if (ticket(drawn) == 0 && lane < p.num_ranks)
        store_number(s.peers[lane] + p.rank * p.space.sender_bytes + p.space.begun, 0, epoch);
    int most = 0;
#pragma unroll 1
    for (int r = 0; r < p.num_ranks; ++r)
        if (r != p.rank) most = max(most, s.tokens[r]);
    const int units = most * others * p.parts;
#pragma unroll 1
    for (int unit = ticket(drawn); unit < units; unit = ticket(drawn)) {
        drawn = draw(p.state->tickets[0]);
        const int part = unit % p.parts, source = (p.rank + 1 + unit / p.parts % others) % p.num_ranks;
        const int token = unit / p.parts / others;
        if (token >= s.tokens[source]) continue;
        const Unit u = take(p, s, source, token, part);
        if (!__any_sync(~0u, u.row != NOT_HERE)) continue;  // the token's rank does not wait for it
        char* to = s.peers[source] + p.rank * p.space.sender_bytes;
        const int most_vectors = piece_of(u.rows);
#pragma unroll 1
        for (int begin = u.begin; u.rows && begin < u.end; begin += most_vectors) {
            const int size = min(most_vectors, u.end - begin);
            if (lane == 0) announce(u.full, u.rows * size * 16);
            await_stores_read();  // of the piece before
            __syncwarp();
            load_rows(p, u, begin, size);
            await_bytes(u.full, phase);
            phase ^= 1;
#pragma unroll 1
            for (int v = lane; v < size; v += 32) u.stage[v] = sum_rows(u, size, v);
            fence_before_store();
            __syncwarp();
            if (lane == 0) bulk_store(to + p.space.sums + (i64)token * p.row_bytes + begin * 16, u.stage, size * 16);
        }
        if (lane == 0) {
            await_stores();
            u32* flag = (u32*)(to + p.space.arrived) + (i64)token * p.parts + part;
            store_release(flag, epoch << 1 | (u.rows > 0));  // 0: none had room
        }
    }
    await_stores_read();
    __syncwarp();
}

__device__ __forceinline__ void sum_up(const CombineParams& p, CombineShared& s, u32 epoch, u64 deadline, u32 drawn,
                                       u32& phase) {
    const int lane = lane_id(), units = s.tokens[p.rank] * p.parts;
    const char* mine = s.peers[p.rank] + lane * p.space.sender_bytes;  // what rank `lane` has sent
    if (ticket(drawn) == 0 && lane < p.num_ranks && p.num_ranks > 1)  // so that no rank is two launches ahead
        wait_while(p.state, deadline, 3, [&] { return is_of(load_number(mine + p.space.begun), epoch) ? -1 : lane; });
    __syncwarp();
#pragma unroll 1
    for (int unit = ticket(drawn); unit < units; unit = ticket(drawn)) {
        drawn = draw(p.state->tickets[1]);
        const int token = unit / p.parts, part = unit % p.parts;
        i64 id = -1;
        if (lane < p.num_topk) {
            const i64 pair = (i64)token * p.num_topk + lane;
            id = p.ids_are_64 ? ((const i64*)p.topk_idx)[pair] : ((const int*)p.topk_idx)[pair];
        }
        const Unit u = take(p, s, p.rank, token, part);
        const int rank = id >= 0 && id < p.num_experts ? p.expert_rank[id] : -1;  // lane k: who serves slot k
        const u32 asked = __reduce_or_sync(~0u, rank >= 0 ? 1u << rank : 0);
        u32 ranks = asked;  // without those that had no room for any row: they bring a row of zeros
        if (u.rows == 0) ranks &= ~(1u << p.rank);
        const u32 others = ranks & ~(1u << p.rank);
        const bool sender = others >> lane & 1;
        const int most_vectors = piece_of(u.rows + __popc(others));
        char* y = p.y + (i64)token * p.row_bytes;
#pragma unroll 1
        for (int begin = u.begin; begin < u.end; begin += most_vectors) {
            const int size = min(most_vectors, u.end - begin);
            load_rows(p, u, begin, size);
            if (begin == u.begin && others) {
                u32 value = epoch << 1 | 1;
                if (sender) {
                    const u32* flag = (const u32*)(mine + p.space.arrived) + (i64)token * p.parts + part;
                    wait_while(p.state, deadline, 3, [&] {
                        value = load_acquire(flag);
                        return (value ^ epoch << 1) <= 1 ? -1 : lane;
                    });
                    fence_before_load();
                }
                ranks &= ~__ballot_sync(~0u, value == epoch << 1);
            }
            const u32 senders = ranks & ~(1u << p.rank);
            if (senders >> lane & 1) {
                const int place = u.rows + __popc(senders & ((1u << lane) - 1));
                const char* sums = mine + p.space.sums + (i64)token * p.row_bytes;
                bulk_load(u.stage + place * size, sums + begin * 16, size * 16, u.full);
            }
            if (lane == 0) announce(u.full, (u.rows + __popc(senders)) * size * 16);
            await_bytes(u.full, phase);
            phase ^= 1;
#pragma unroll 1
            for (int v = lane; v < size; v += 32) {
                Vector only = {0, 0, 0, 0};
                Floats sum;
                int terms = 0, place = u.rows;
#pragma unroll 1
                for (u32 left = ranks; left; left &= left - 1, ++terms) {
                    const int from = __ffs(left) - 1;
                    only = from == p.rank ? sum_rows(u, size, v) : u.stage[place++ * size + v];
                    add(sum, widen(only), terms == 0);
                }
                if (terms > 0 && ranks != asked) {  // wherever the zeros stand in the sum, they change -0 only
#pragma unroll
                    for (int k = 0; k < 8; ++k) sum.v[k] = __fadd_rn(sum.v[k], 0.0f);
                    ++terms;
                }
                ((Vector*)y)[begin + v] = terms > 1 ? round_bf16(sum) : only;
            }
            __syncwarp();
        }
    }
}

__device__ __forceinline__ void run_combine(const CombineParams& p) {
    extern __shared__ __align__(128) char shared[];
    CombineShared& s = *(CombineShared*)shared;
    const int thread = threadIdx.x, warp = thread / 32, lane = lane_id();
    const bool sends = p.num_ranks > 1 && warp < SEND_WARPS;
    u32 drawn = draw(p.state->tickets[sends ? 0 : 1]), phase = 0;
    const u32 epoch = *(volatile u32*)&p.state->epoch + 1;
    const u64 deadline = nanoseconds() + p.timeout_ns;
    if (thread == 0) s.left = 0;
    if (thread < p.num_ranks) s.peers[thread] = p.peers[thread] + (epoch & 1) * p.space.bank_bytes;
    if (thread < p.num_ranks) s.tokens[thread] = p.tokens_of_rank[thread];
    if (lane == 0) init_barrier(&s.full[warp]);
    __syncthreads();
    if (sends) {
        send_sums(p, s, epoch, drawn, phase);
        drawn = draw(p.state->tickets[1]);
    }
    sum_up(p, s, epoch, deadline, drawn, phase);
    if (lane == 0) leave(p.state, &s.left, COMBINE_WARPS, epoch);
}

__global__ void __launch_bounds__(COMBINE_THREADS, 1) combine(const __grid_constant__ CombineParams p) { run_combine(p); }

// Several ranks on one GPU, for tests.
__global__ void __launch_bounds__(COMBINE_THREADS, 1) combine_virtual(const CombineParams* p) { run_combine(p[blockIdx.y]); }

}  // namespace moeloom
