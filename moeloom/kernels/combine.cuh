// combine: bring each token's rows back to the token's own rank, summed as far as the reduction allows, and sum there.
//
// per_rank: the rank that has rows of a token sums them (fp32, in slot order), rounds, and sends the sum; the token's
// rank adds the sums of all ranks in rank order. per_slot: every row travels, and is summed in slot order. A row for
// which there was no room is one of zeros.
//
// A unit of work is a part of one token's row. To SEND is to take units of other ranks' tokens by ticket, and waits for
// nothing; to SUM is to take units of own tokens, and waits for what peers send. So even one block at a time gets
// through. With few units every warp sends before it sums; with many, some sum from the start, so that link and memory
// are busy at once.
//
// Each warp has a stage in shared memory. The copy engine brings a piece of every row of the token there at once: that
// keeps enough bytes under way without registers. What goes to a peer are words that say themselves that they have
// come, because they are not zero; who reads them makes them zero again, for the launch after the next. So no flag
// makes a trip of its own, and no sender waits until its stores have arrived.
#pragma once
#include "bulk.cuh"

namespace moeloom {

constexpr int COMBINE_WARPS = 16, COMBINE_THREADS = 32 * COMBINE_WARPS;
constexpr int SEND_WARPS = 6;  // of them, where units are many: fewer do not fill the link, more were slower
constexpr int COMBINE_STAGE = 196608 / COMBINE_WARPS / 16;  // vectors of each warp
constexpr int MAX_PARTS = 32;  // of a token's row

// What one rank has sent to another, in each of two banks: offsets in bytes from the receiver's symmetric memory.
struct CombineSpace {
    i64 bank_bytes, sender_bytes;  // strides
    i64 begun;  // of bank 0, sender 0: a number that says that the sender has begun this launch
    i64 sums;   // [tokens] rows, zeros where nothing has come
    i64 slots;  // [tokens, topk] rows, the same, once for all senders
};

struct CombineParams {
    const char* rows;
    const int* pair_row;        // [ranks, max_tokens, topk] of dispatch
    const float* row_weight;    // [rows], or null: rows are weighted already, or at their token's rank
    const float* topk_weights;  // of own tokens, or null
    const int* tokens_of_rank;  // [ranks]
    const void* topk_idx;       // of own tokens
    const int* expert_rank;
    char* const* peers;
    State* state;
    char* y;
    CombineSpace space;
    i64 timeout_ns;
    int num_tokens;  // own, at most
    int max_tokens, num_topk, num_experts, num_ranks, rank, row_bytes, ids_are_64;
    int parts;       // 0: as many as are good for a rank's number of tokens
};

struct CombineShared {
    Vector stages[COMBINE_WARPS][COMBINE_STAGE];
    float weights[COMBINE_WARPS][32];
    u64 full[COMBINE_WARPS];
    char* peers[MAX_RANKS];  // in this launch's bank
    int tokens[MAX_RANKS];
    int parts[MAX_RANKS];
    u32 drawn[2];  // tickets of SEND and of SUM that the block begins with
    u32 left;
};

struct Bf16 {
    static constexpr int COUNT = 8;  // in a vector

    static __device__ __forceinline__ void widen(Vector from, float (&to)[COUNT]) {
        const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            to[2 * i] = __uint_as_float(words[i] << 16);
            to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }

    static __device__ __forceinline__ Vector round(const float (&from)[COUNT]) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(from[2 * i + 1]), "f"(from[2 * i]));
        return {words[0], words[1], words[2], words[3]};
    }
};

struct Fp32 {
    static constexpr int COUNT = 4;

    static __device__ __forceinline__ void widen(Vector from, float (&to)[COUNT]) {
        to[0] = __uint_as_float(from.x);
        to[1] = __uint_as_float(from.y);
        to[2] = __uint_as_float(from.z);
        to[3] = __uint_as_float(from.w);
    }

    static __device__ __forceinline__ Vector round(const float (&from)[COUNT]) {
        return {__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]), __float_as_uint(from[3])};
    }
};

// The first quarter of a word as it travels. Zero would say that it has not come: that is a NaN, and another one goes.
__device__ __forceinline__ u32 as_travels(u32 bits) { return bits == ~0u ? 0x80008000u : ~bits; }

__device__ __forceinline__ u32 as_sent(u32 bits) { return ~bits; }

// What was fastest: for few tokens a unit for each warp of a GPU, for many a row in four.
__device__ __forceinline__ int parts_of(const CombineParams& p, int tokens) {
    const int few = (tokens <= 128 ? 2048 : 1024) / max(tokens, 1);
    const int wanted = tokens <= 256 ? min(few, MAX_PARTS) : max(min(6144 / tokens, 8), 4);
    return p.parts ? p.parts : max(1, min(wanted, p.row_bytes / 512));  // a vector for each lane
}

struct CombineStage {
    Vector* data;
    float* weights;  // of its rows, in shared memory
    u64* full;
    u32 phase;

    __device__ __forceinline__ void await() {
        await_bytes(full, phase);
        phase ^= 1;
    }
};

// A part of a token's row.
struct Unit {
    int token;
    int begin, end;  // vectors of the row
    int row;         // lane k: local row of slot k, NOT_HERE or NO_ROOM
};

__device__ __forceinline__ Unit take(const CombineParams& p, const CombineShared& s, int source, int index) {
    const int vectors = p.row_bytes / 16, parts = s.parts[source], size = (vectors + parts - 1) / parts;
    Unit u;
    u.token = index / parts;
    u.begin = min(index % parts * size, vectors);
    u.end = min(u.begin + size, vectors);
    u.row = NOT_HERE;
    if (lane_id() < p.num_topk) u.row = p.pair_row[((i64)source * p.max_tokens + u.token) * p.num_topk + lane_id()];
    return u;
}

__device__ __forceinline__ u32 lanes_below() { return (1u << lane_id()) - 1; }

// Vectors of each of `rows` rows that come at once: few pieces, about equal, in whole trips of a warp if it can be.
__device__ __forceinline__ int piece_of(const Unit& u, int rows) {
    const int most = COMBINE_STAGE / max(rows, 1), vectors = u.end - u.begin, pieces = (vectors + most - 1) / most;
    const int size = (vectors + pieces - 1) / max(pieces, 1), trips = (size + 31) / 32 * 32;
    return trips <= most ? trips : size;
}

__device__ __forceinline__ void load_row(const CombineParams& p, const CombineStage& stage, int place, int row,
                                         int begin, int size) {
    bulk_load(stage.data + place * size, p.rows + (i64)row * p.row_bytes + begin * 16, size * 16, stage.full);
}

// By all lanes, into the places of those that have one to fill.
__device__ __forceinline__ void fill_zeros(const CombineStage& stage, bool mine, int place, int size) {
#pragma unroll 1
    for (u32 left = __ballot_sync(~0u, mine); left; left &= left - 1) {
        Vector* to = stage.data + __shfl_sync(~0u, place, __ffs(left) - 1) * size;
#pragma unroll 1
        for (int v = lane_id(); v < size; v += 32) to[v] = {0, 0, 0, 0};
    }
}

// The sum of the stage's rows at one vector of the piece, in their order, rounded. It begins with the first: never
// added to zero, -0 stays -0.
template <class Element>
__device__ __forceinline__ Vector sum_rows(const Vector* at, int rows, int size, const float* weights) {
    constexpr int GROUP = 4;
    float sum[Element::COUNT] = {};
    Vector loaded[GROUP] = {};
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += GROUP) {
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
            if (begin + i < rows) loaded[i] = at[(begin + i) * size];
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            if (begin + i >= rows) continue;
            float term[Element::COUNT];
            Element::widen(loaded[i], term);
            const float scale = weights ? weights[begin + i] : 1.0f;
#pragma unroll
            for (int k = 0; k < Element::COUNT; ++k) {
                if (weights) term[k] = __fmul_rn(term[k], scale);
                sum[k] = begin + i == 0 ? term[k] : __fadd_rn(sum[k], term[k]);
            }
        }
    }
    return Element::round(sum);
}

// ---- SEND

__device__ __forceinline__ void send_word(char* to, int vector, Vector v) {
    store_word(to + vector * 16, as_travels(v.x), v.y, v.z, v.w);
}

// What this rank has of a token, to where the token's rank wants it: the sum of its rows, or each of them.
template <class Element, bool SLOTS>
__device__ __forceinline__ void send_unit(const CombineParams& p, CombineStage& stage, const Unit& u, char* to) {
    const int lane = lane_id();
    const u32 local = __ballot_sync(~0u, u.row >= 0), held = __ballot_sync(~0u, u.row != NOT_HERE);
    const int rows = __popc(local), place = __popc(local & lanes_below()), most = piece_of(u, rows);
#pragma unroll 1
    for (int begin = u.begin; begin < u.end; begin += most) {
        const int size = min(most, u.end - begin);
        if (u.row >= 0) load_row(p, stage, place, u.row, begin, size);
        if (lane == 0) announce(stage.full, rows * size * 16);
        if (p.row_weight && u.row >= 0) stage.weights[place] = p.row_weight[u.row];
        __syncwarp();
        stage.await();
        if constexpr (SLOTS) {
#pragma unroll 1
            for (u32 left = held; left; left &= left - 1) {
                const int k = __ffs(left) - 1, from = __popc(local & ((1u << k) - 1)) * size;
#pragma unroll 1
                for (int v = lane; v < size; v += 32) {
                    const Vector row = local >> k & 1 ? stage.data[from + v] : Vector{0, 0, 0, 0};
                    send_word(to + (i64)k * p.row_bytes, begin + v, row);
                }
            }
        } else {
            const float* weights = p.row_weight ? stage.weights : nullptr;
#pragma unroll 1
            for (int v = lane; v < size; v += 32)
                send_word(to, begin + v, sum_rows<Element>(stage.data + v, rows, size, weights));
        }
        __syncwarp();  // the stage is free again
    }
}

// Of the other rank with the most.
__device__ __forceinline__ int most_units(const CombineParams& p, const CombineShared& s) {
    int most = 0;
#pragma unroll 1
    for (int r = 0; r < p.num_ranks; ++r)
        if (r != p.rank) most = max(most, s.tokens[r] * s.parts[r]);
    return most;
}

template <class Element, bool SLOTS>
__device__ __forceinline__ void send(const CombineParams& p, CombineShared& s, CombineStage& stage, u32 epoch,
                                     int units, u32 drawn) {
    const int lane = lane_id(), others = p.num_ranks - 1;
    if (ticket(drawn) == 0 && lane < p.num_ranks)
        store_number(s.peers[lane] + p.rank * p.space.sender_bytes + p.space.begun, 0, epoch);
#pragma unroll 1
    for (int unit = ticket(drawn); unit < units; unit = ticket(drawn)) {
        drawn = draw(p.state->tickets[0]);
        const int source = (p.rank + 1 + unit % others) % p.num_ranks, index = unit / others;
        if (index >= s.tokens[source] * s.parts[source]) continue;
        const Unit u = take(p, s, source, index);
        if (!__any_sync(~0u, u.row != NOT_HERE)) continue;  // the token's rank does not wait for it
        char* to = s.peers[source];
        if (SLOTS)
            to += p.space.slots + (i64)u.token * p.num_topk * p.row_bytes;
        else
            to += p.rank * p.space.sender_bytes + p.space.sums + (i64)u.token * p.row_bytes;
        send_unit<Element, SLOTS>(p, stage, u, to);
    }
}

// ---- SUM

// What a token's sum is made of: per_slot a row for each slot, per_rank one for each rank.
struct Terms {
    int rank;    // lane k: who serves slot k, or -1
    u32 others;  // terms that come from other ranks
    bool own;    // this rank serves a slot
    int count;
    int place;   // of term `lane` in the stage, in order
};

template <bool SLOTS>
__device__ __forceinline__ Terms find_terms(const CombineParams& p, int token) {
    const int lane = lane_id();
    i64 id = -1;
    if (lane < p.num_topk) {
        const i64 pair = (i64)token * p.num_topk + lane;
        id = p.ids_are_64 ? ((const i64*)p.topk_idx)[pair] : ((const int*)p.topk_idx)[pair];
    }
    Terms t;
    t.rank = id >= 0 && id < p.num_experts ? p.expert_rank[id] : -1;
    const u32 ranks = __reduce_or_sync(~0u, t.rank >= 0 ? 1u << t.rank : 0), own = 1u << p.rank;
    const u32 terms = SLOTS ? __ballot_sync(~0u, t.rank >= 0) : ranks;
    t.others = SLOTS ? __ballot_sync(~0u, t.rank >= 0 && t.rank != p.rank) : ranks & ~own;
    t.own = ranks & own;
    t.count = __popc(terms);
    t.place = __popc(terms & lanes_below());
    return t;
}

// A piece of a row that rank `sender` sends, into the stage; where it was, zeros. False if it did not come.
__device__ __forceinline__ bool fetch_words(const CombineParams& p, char* from, Vector* to, int size, u64 deadline,
                                            int sender) {
    constexpr int BATCH = 4;  // under way per lane
    bool come = true;
#pragma unroll 1
    for (int v = lane_id(); v < size; v += 32 * BATCH) {
        Vector words[BATCH];
        wait_while(p.state, deadline, 3, [&] {
            bool missing = false;
#pragma unroll
            for (int j = 0; j < BATCH; ++j) words[j] = load_word(from + (v + 32 * j < size ? v + 32 * j : v) * 16);
#pragma unroll
            for (int j = 0; j < BATCH; ++j) missing |= words[j].x == 0;
            return missing ? sender : -1;
        });
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            if (v + 32 * j >= size) continue;
            come &= words[j].x != 0;
            to[v + 32 * j] = {as_sent(words[j].x), words[j].y, words[j].z, words[j].w};
            *(Vector*)(from + (v + 32 * j) * 16) = {0, 0, 0, 0};
        }
    }
    return come;
}

// What this rank itself has of a piece, into its place in the stage; summed, if the reduction does so.
template <class Element, bool SLOTS>
__device__ __forceinline__ void bring_own(const CombineParams& p, CombineStage& stage, const Unit& u, const Terms& t,
                                          int begin, int size) {
    const u32 local = __ballot_sync(~0u, u.row >= 0);
    const int rows = __popc(local), place = SLOTS ? t.place : __popc(local & lanes_below());
    const float* weights = p.row_weight ? stage.weights : nullptr;
    if (u.row >= 0) load_row(p, stage, place, u.row, begin, size);
    if (lane_id() == 0) announce(stage.full, rows * size * 16);
    if (!SLOTS && p.row_weight && u.row >= 0) stage.weights[place] = p.row_weight[u.row];
    if (SLOTS) fill_zeros(stage, u.row == NO_ROOM, place, size);
    __syncwarp();
    stage.await();
    if (SLOTS) return;
    Vector* to = stage.data + __shfl_sync(~0u, t.place, p.rank) * size;
#pragma unroll 1
    for (int v = lane_id(); v < size; v += 32) to[v] = sum_rows<Element>(stage.data + v, rows, size, weights);
    __syncwarp();
}

template <class Element, bool SLOTS>
__device__ __forceinline__ void sum_up(const CombineParams& p, CombineShared& s, CombineStage& stage, u32 epoch,
                                       u64 deadline, u32 drawn) {
    const int lane = lane_id(), units = s.tokens[p.rank] * s.parts[p.rank];
    char* mine = s.peers[p.rank];
    const bool is_first = ticket(drawn) == 0;
#pragma unroll 1
    for (int unit = ticket(drawn); unit < units; unit = ticket(drawn)) {
        drawn = draw(p.state->tickets[1]);
        const Unit u = take(p, s, p.rank, unit);
        const Terms t = find_terms<SLOTS>(p, u.token);
        const int local = __popc(__ballot_sync(~0u, u.row >= 0)), most = piece_of(u, max(local, t.count));
        if (SLOTS && p.topk_weights && t.rank >= 0)
            stage.weights[t.place] = p.topk_weights[(i64)u.token * p.num_topk + lane];
        Vector* y = (Vector*)(p.y + (i64)u.token * p.row_bytes);
        bool come = true;
#pragma unroll 1
        for (int begin = u.begin; begin < u.end; begin += most) {
            const int size = min(most, u.end - begin);
            if (t.own) bring_own<Element, SLOTS>(p, stage, u, t, begin, size);
#pragma unroll 1
            for (u32 left = t.others; left; left &= left - 1) {
                const int term = __ffs(left) - 1, sender = SLOTS ? __shfl_sync(~0u, t.rank, term) : term;
                char* from = mine + (SLOTS ? p.space.slots + ((i64)u.token * p.num_topk + term) * p.row_bytes
                                           : sender * p.space.sender_bytes + p.space.sums + (i64)u.token * p.row_bytes);
                Vector* to = stage.data + __shfl_sync(~0u, t.place, term) * size;
                come &= fetch_words(p, from + begin * 16, to, size, deadline, sender);
            }
            const float* weights = SLOTS && p.topk_weights ? stage.weights : nullptr;
            const u32 lost = __all_sync(~0u, come) ? 0 : ~0u;  // NaN
#pragma unroll 1
            for (int v = lane; v < size; v += 32) {
                const Vector sum = sum_rows<Element>(stage.data + v, t.count, size, weights);
                y[begin + v] = {sum.x | lost, sum.y | lost, sum.z | lost, sum.w | lost};
            }
            fence_before_store();  // the copy engine writes next where this warp has written
            __syncwarp();
        }
    }
    if (is_first && lane < p.num_ranks && p.num_ranks > 1) {  // so that no rank is two launches ahead
        const char* begun = mine + lane * p.space.sender_bytes + p.space.begun;
        wait_while(p.state, deadline, 3, [&] { return is_of(load_number(begun), epoch) ? -1 : lane; });
    }
}

// Asks for the tables that the launch reads before it reads rows.
__device__ __forceinline__ void prefetch(const CombineParams& p) {
    const i64 line = ((i64)blockIdx.x * 32 + lane_id()) * 128, pairs = (i64)p.num_tokens * p.num_topk;
    if (line < p.num_experts * 4) prefetch_line((const char*)p.expert_rank + line);
    if (line < pairs * (p.ids_are_64 ? 8 : 4)) prefetch_line((const char*)p.topk_idx + line);
#pragma unroll 1
    for (int r = 0; r < p.num_ranks && line < pairs * 4; ++r)
        prefetch_line((const char*)(p.pair_row + (i64)r * p.max_tokens * p.num_topk) + line);
}

__device__ __forceinline__ int send_warps(int units) {
    return units > COMBINE_WARPS * (int)gridDim.x ? SEND_WARPS : COMBINE_WARPS;
}

// Tickets that a block begins with, so that its warps need not draw one each: right if other ranks have as many tokens.
struct Shares {
    int send, sum;
};

__device__ __forceinline__ Shares first_tickets(const CombineParams& p) {
    const int own = p.num_tokens * parts_of(p, p.num_tokens), others = own * (p.num_ranks - 1), blocks = gridDim.x;
    const int senders = p.num_ranks > 1 ? send_warps(others) : 0;
    const int summers = senders < COMBINE_WARPS ? COMBINE_WARPS - senders : COMBINE_WARPS;
    return {min(others / blocks + 1, senders), min(own / blocks + 1, summers)};
}

template <class Element, bool SLOTS>
__device__ __forceinline__ void run_combine(const CombineParams& p) {
    extern __shared__ __align__(128) char shared[];
    CombineShared& s = *(CombineShared*)shared;
    const int thread = threadIdx.x, warp = thread / 32, lane = lane_id();
    const Shares begin = first_tickets(p);
    if (warp < 2 && lane == 0) s.drawn[warp] = atomicAdd(&p.state->tickets[warp].value, warp ? begin.sum : begin.send);
    const u32 epoch = *(volatile u32*)&p.state->epoch + 1;
    if (thread < p.num_ranks) {
        const int tokens = p.tokens_of_rank[thread];
        s.peers[thread] = p.peers[thread] + (epoch & 1) * p.space.bank_bytes;
        s.tokens[thread] = tokens;
        s.parts[thread] = parts_of(p, tokens);
    }
    if (warp == COMBINE_WARPS - 1) prefetch(p);
    const u64 deadline = nanoseconds() + p.timeout_ns;
    if (thread == 0) s.left = 0;
    CombineStage stage{s.stages[warp], s.weights[warp], &s.full[warp], 0};
    if (lane == 0) init_barrier(stage.full);
    __syncthreads();
    const int units = most_units(p, s) * (p.num_ranks - 1), blocks = gridDim.x;
    if (warp < begin.send || (warp * blocks < units && warp < send_warps(units))) {
        const u32 drawn = warp < begin.send ? s.drawn[0] + warp : draw(p.state->tickets[0]);
        send<Element, SLOTS>(p, s, stage, epoch, units, drawn);
    }
    const int from_last = COMBINE_WARPS - 1 - warp;  // the last have the least to send
    const u32 drawn = from_last < begin.sum ? s.drawn[1] + from_last : draw(p.state->tickets[1]);
    sum_up<Element, SLOTS>(p, s, stage, epoch, deadline, drawn);
    if (lane == 0) leave(p.state, &s.left, COMBINE_WARPS, epoch);
}

template <class Element, bool SLOTS>
__global__ void __launch_bounds__(COMBINE_THREADS, 1) combine(const __grid_constant__ CombineParams p) {
    run_combine<Element, SLOTS>(p);
}

}  // namespace moeloom
