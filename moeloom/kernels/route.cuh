// route: one warp chooses a token's experts and weighs them, as moeloom/route.py says.
//
// What ranks an expert is its key: an unsigned number in the order of the biased scores, and 0, below all of them, once
// it is taken or if its group is not chosen. Lane l reads and scores experts l, 32 + l, ...; then it looks after those
// from PER_LANE * l on, so that of equal keys the one of the lowest lane is that of the lowest expert.
#pragma once
#include "signals.cuh"

namespace moeloom {

constexpr int ROUTE_WARPS = 4, ROUTE_THREADS = 32 * ROUTE_WARPS;
constexpr int SCORE_SOFTMAX = 0, SCORE_SIGMOID = 1, SCORE_SQRT_SOFTPLUS = 2;
constexpr float LARGEST = 0x1.fffffep+127f, SMALLEST_NORMAL = 0x1p-126f, NORMALIZE_EPSILON = 1e-20f;

// Of a multiprocessor at once; this bounds the registers, without spills.
constexpr int route_blocks(int per_lane) { return per_lane <= 8 ? 16 : per_lane <= 16 ? 8 : 4; }

struct RouteParams {
    const void* logits;
    const float* bias;  // [experts], or null
    i64* topk_idx;      // [tokens, topk]
    float* topk_weights;
    i64 logits_stride;  // elements
    int num_tokens, num_experts, num_topk, score, normalize;
    int num_groups, num_topk_groups, group_size;
    int group_best;     // how many of a group's experts rank it: 1 or 2
    int group_shift;    // log2 of the lanes that share a group
    int group_share;    // experts for each of those
    int group_inverse;  // 2^20 / group_size, rounded up: exact below 1024 experts
    float scale;
};

// Of one warp; see `place`.
template <int PER_LANE>
struct RouteRow {
    u32 keys[33 * PER_LANE];
    float scores[33 * PER_LANE];
};

// A bank is left out after 32 experts: both ways of sharing them among lanes are without conflicts.
__device__ __forceinline__ u32 place(u32 expert) { return expert + expert / 32; }

__device__ __forceinline__ float read_logit(const float* from) { return __ldg(from); }

__device__ __forceinline__ float read_logit(const u16* from) { return __uint_as_float((u32)__ldg(from) << 16); }

// No biased score is -0, which would be below 0.
__device__ __forceinline__ u32 key_of(float choice) {
    const u32 bits = __float_as_uint(choice);
    return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ float choice_of(u32 key) {
    return __uint_as_float(key ^ ((u32)((int)~key >> 31) | 0x80000000u));
}

// As in Router.choose: NaN is the lowest number, and infinities are the last ones. fmaxf skips NaN.
__device__ __forceinline__ float limited(float choice) { return fminf(fmaxf(choice, -LARGEST), LARGEST); }

__device__ __forceinline__ float sum_over_lanes(float x) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

// For 1 to 2^20; nearly always correctly rounded.
__device__ __forceinline__ float inverse_of(float x) {
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
    return __fmaf_rn(__fmaf_rn(-near, x, 1.0f), near, near);
}

// In place; -inf where there is no expert.
template <int PER_LANE>
__device__ __forceinline__ void softmax(float (&x)[PER_LANE]) {
    float top = x[0], sum = 0.0f;
#pragma unroll
    for (int j = 1; j < PER_LANE; ++j) top = fmaxf(top, x[j]);
    top = choice_of(__reduce_max_sync(~0u, key_of(top)));
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        x[j] = expf(__fsub_rn(x[j], top));
        sum = __fadd_rn(sum, x[j]);
    }
    sum = sum_over_lanes(sum);
    // a division, correctly rounded but for subnormal results, of which the first half is done once
    const float inverse = inverse_of(sum);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const float near = __fmul_rn(x[j], inverse);
        x[j] = __fmaf_rn(__fmaf_rn(-near, sum, x[j]), inverse, near);
    }
}

// By exp(-|x|): of a large x nothing overflows on the way.
__device__ __forceinline__ float sigmoid(float x) {
    const float small = expf(-fabsf(x)), inverse = inverse_of(__fadd_rn(1.0f, small));
    return x < 0.0f ? __fmul_rn(small, inverse) : inverse;
}

__device__ __forceinline__ float sqrt_softplus(float x) {
    const float y = x > 20.0f ? x : log1pf(expf(x));
    return __fsqrt_rn(y < SMALLEST_NORMAL ? SMALLEST_NORMAL : y);  // NaN stays
}

// The best groups, as bits. A group's lanes share its experts; the lowest group of equal ones is first.
template <int PER_LANE>
__device__ __forceinline__ u32 best_groups(const RouteParams& p, const RouteRow<PER_LANE>& row) {
    const int lane = lane_id(), lanes = 1 << p.group_shift, group = lane >> p.group_shift;
    const int begin = (lane & (lanes - 1)) * p.group_share, end = min(begin + p.group_share, p.group_size);
    u32 best = 0, second = 0;
    for (int i = begin; i < (group < p.num_groups ? end : 0); ++i) {
        const u32 key = row.keys[place(group * p.group_size + i)];
        second = max(second, min(best, key));
        best = max(best, key);
    }
    for (int distance = 1; distance < lanes; distance *= 2) {
        const u32 other = __shfl_xor_sync(~0u, best, distance), other_second = __shfl_xor_sync(~0u, second, distance);
        second = max(max(second, other_second), min(best, other));
        best = max(best, other);
    }
    const float rank = p.group_best == 2 ? __fadd_rn(choice_of(best), choice_of(second)) : choice_of(best);
    u32 key = group < p.num_groups ? key_of(rank) : 0, chosen = 0;
#pragma unroll 1
    for (int i = 0; i < p.num_topk_groups; ++i) {
        const u32 largest = __reduce_max_sync(~0u, key);
        const int winner = (__ffs(__ballot_sync(~0u, key == largest)) - 1) >> p.group_shift;
        chosen |= 1u << winner;
        if (group == winner) key = 0;
    }
    return chosen;
}

// Takes the experts of all other groups out.
template <int PER_LANE>
__device__ __forceinline__ void choose_groups(const RouteParams& p, RouteRow<PER_LANE>& row) {
    const u32 chosen = best_groups(p, row);
    const u32 first = PER_LANE * lane_id();
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const u32 group = (first + j) * p.group_inverse >> 20;
        if (!(chosen >> min(group, 31u) & 1)) row.keys[place(first) + j] = 0;
    }
    __syncwarp();
}

// Lane k gets the k-th expert: the largest key, of equal ones the lowest expert.
template <int PER_LANE>
__device__ __forceinline__ u32 choose(const RouteParams& p, RouteRow<PER_LANE>& row) {
    const u32 lane = lane_id(), share = lane % PER_LANE;
    u32 head = 0;  // the largest of this lane's experts
    u32 chosen = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) head = max(head, row.keys[place(PER_LANE * lane) + j]);
#pragma unroll 1
    for (u32 k = 0; k < p.num_topk; ++k) {
        const u32 largest = __reduce_max_sync(~0u, head);
        const u32 owner = __ffs(__ballot_sync(~0u, head == largest)) - 1;
        // all lanes look for it and for the next one of its lane; each reads again only what it wrote itself
        u32* const at = &row.keys[place(PER_LANE * owner) + share];
        u32 key = *at;
        const u32 which = __ffs(__ballot_sync(~0u, key == largest)) - 1;
        if (share == which) *at = key = 0;
        const u32 next = __reduce_max_sync(~0u, key);
        if (lane == owner) head = next;
        if (lane == k) chosen = PER_LANE * owner + which;
    }
    return chosen;
}

// -inf where there is no expert: not above any, and after those.
template <class Number, int PER_LANE>
__device__ __forceinline__ void read_row(
    const RouteParams& p, i64 token, float (&x)[PER_LANE], float (&bias)[PER_LANE]) {
    const int lane = lane_id(), experts = p.num_experts - lane;
    const Number* logits = (const Number*)p.logits + token * p.logits_stride + lane;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        x[j] = bias[j] = __int_as_float(0xff800000);
        if (32 * j < experts) x[j] = read_logit(logits + 32 * j);
        if (32 * j < experts) bias[j] = 0.0f;
    }
    if (!p.bias) return;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j)
        if (32 * j < experts) bias[j] = __ldg(p.bias + lane + 32 * j);
}

template <class Number, int PER_LANE>
__global__ void __launch_bounds__(ROUTE_THREADS, route_blocks(PER_LANE))
    route(const __grid_constant__ RouteParams p) {
    __shared__ RouteRow<PER_LANE> rows[ROUTE_WARPS];
    RouteRow<PER_LANE>& row = rows[threadIdx.x / 32];
    const int lane = lane_id();
    const i64 token = (i64)blockIdx.x * ROUTE_WARPS + threadIdx.x / 32;
    if (token >= p.num_tokens) return;

    float x[PER_LANE], bias[PER_LANE];
    read_row<Number>(p, token, x, bias);
    if (p.score == SCORE_SOFTMAX) {
        softmax(x);
    } else if (p.score == SCORE_SIGMOID) {
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) x[j] = sigmoid(x[j]);
    } else {
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) x[j] = sqrt_softplus(x[j]);
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        row.keys[33 * j + lane] = key_of(limited(__fadd_rn(x[j], bias[j])));
        row.scores[33 * j + lane] = x[j];
    }
    __syncwarp();
    if (p.num_groups > 1) choose_groups(p, row);

    const u32 expert = choose(p, row);
    float weight = lane < p.num_topk ? row.scores[place(expert)] : 0.0f;
    if (p.normalize) weight = __fdiv_rn(weight, __fadd_rn(sum_over_lanes(weight), NORMALIZE_EPSILON));
    if (lane >= p.num_topk) return;
    p.topk_idx[token * p.num_topk + lane] = expert;
    p.topk_weights[token * p.num_topk + lane] = __fmul_rn(weight, p.scale);
}

}  // namespace moeloom
