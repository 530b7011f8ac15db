// What lies between the products of the experts stage, forward and backward: activation, router weight, biases and
// padding.
//
// A warp takes one row at a time and finds on the device whose it is, so cost follows the rows that there are. Padding
// rows are never read. A sum over a row or over an expert's rows has a fixed order: the same input gives the same bits.
#pragma once
#include "signals.cuh"

namespace moeloom {

constexpr int ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / 32;
constexpr int SUM_COLUMNS = 64;                            // of a block of sum_rows: a line of 128 bytes of each row
constexpr int SUM_ROWS = ROW_THREADS * 8 / SUM_COLUMNS;  // that it reads at a time

// Rows sorted by expert; between an expert's rows and the next one's, and behind the last one's, there may be padding.
struct ExpertRows {
    const int* start;     // [experts + 1]
    const int* count;     // [experts], without padding
    const float* weight;  // [rows], or null: 1
    int experts, rows;    // rows: allocated
};

// (up + up_offset) * gate * sigmoid(alpha * gate), the inputs clamped first. clamp: infinite for none.
struct SwiGLUParams {
    float clamp, alpha, up_offset;
    int width;     // of gate, and of up
    int gate, up;  // where they begin in a row of both, unless they alternate, gate first
};

// Eight neighbouring columns of a row.
struct Columns {
    float v[8];
};

__device__ __forceinline__ float low_half(u32 word) { return __uint_as_float(word << 16); }

__device__ __forceinline__ float high_half(u32 word) { return __uint_as_float(word & 0xffff0000u); }

__device__ __forceinline__ Columns load_columns(const u16* from) {
    const Vector b = *(const Vector*)from;
    return {low_half(b.x), high_half(b.x), low_half(b.y), high_half(b.y),
            low_half(b.z), high_half(b.z), low_half(b.w), high_half(b.w)};
}

__device__ __forceinline__ Columns load_columns(const float* from) {
    const float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

__device__ __forceinline__ u32 round_pair(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ __forceinline__ void store_columns(u16* to, const Columns& x) {
    *(Vector*)to = {round_pair(x.v[0], x.v[1]), round_pair(x.v[2], x.v[3]), round_pair(x.v[4], x.v[5]),
                    round_pair(x.v[6], x.v[7])};
}

__device__ __forceinline__ void store_zeros(u16* row, int width) {
    for (int i = lane_id() * 8; i < width; i += 256) *(Vector*)(row + i) = {0, 0, 0, 0};
}

// In the same order in every lane, so all have the same bits.
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// 1 / (1 + e^-x), within 2^-16 of itself: far below the rounding to bf16 that follows.
__device__ __forceinline__ float sigmoid(float x) {
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
    return result;
}

// NaN passes, unlike through fminf.
__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }

__device__ __forceinline__ float at_least(float x, float limit) { return x < limit ? limit : x; }

// The activation, and what its gradients are made of. The clamped side of a clamp has gradient 0, its limit 1.
struct Swished {
    float glu, up;     // activation = glu * up
    float glu_of_gate;  // derivative of glu
    bool gate_passes, up_passes;

    __device__ __forceinline__ Swished(const SwiGLUParams& a, float raw_gate, float raw_up) {
        const float gate = at_most(raw_gate, a.clamp), s = sigmoid(a.alpha * gate);
        up = at_least(at_most(raw_up, a.clamp), -a.clamp) + a.up_offset;
        glu = gate * s;
        glu_of_gate = s * __fmaf_rn(a.alpha * gate, 1.0f - s, 1.0f);
        gate_passes = !(raw_gate > a.clamp);
        up_passes = !(raw_up > a.clamp) && !(raw_up < -a.clamp);
    }

    __device__ __forceinline__ float value() const { return glu * up; }
};

// Whose row it is, if it is not of an expert before `expert`; `experts` if it is behind all.
__device__ __forceinline__ int owner(const ExpertRows& own, i64 row, int expert) {
    while (true) {
        const int next = expert + (int)lane_id();
        const int passed = __popc(__ballot_sync(~0u, next < own.experts && own.start[next + 1] <= row));
        expert += passed;
        if (passed < 32) return expert;
    }
}

// work(row, expert, valid) by a warp for each of an expert's rows and the padding behind them, then for the rows behind
// all experts if `tail`: expert is -1 there.
template <class Work>
__device__ __forceinline__ void each_row(const ExpertRows& own, bool tail, Work work) {
    int expert = 0;
#pragma unroll 1
    for (i64 row = blockIdx.x * ROW_WARPS + threadIdx.x / 32; row < own.rows; row += gridDim.x * ROW_WARPS) {
        expert = owner(own, row, expert);
        const bool behind = expert == own.experts;
        if (behind && !tail) return;
        work(row, behind ? -1 : expert, !behind && row - own.start[expert] < own.count[expert]);
    }
}

__device__ __forceinline__ float weight_of(const ExpertRows& own, i64 row) {
    return own.weight ? own.weight[row] : 1.0f;
}

// Eight columns of a lane. Where gate and up lie apart, they are neighbours. Where those alternate, they are two times
// four, half a trip of the warp apart: so neighbouring lanes write neighbouring vectors, and no sector by halves.
template <bool alternate>
struct Trip {
    int first, second, width;

    __device__ __forceinline__ explicit Trip(int width)
        : first(lane_id() * (alternate ? 4 : 8)), second(first + (alternate ? 128 : 4)), width(width) {}

    __device__ __forceinline__ void next() { first += 256, second += 256; }

    __device__ __forceinline__ bool any() const { return first < width; }

    __device__ __forceinline__ bool whole() const { return !alternate || second < width; }

    // Of a row with one number for each column.
    __device__ __forceinline__ Columns load(const u16* row) const {
        if constexpr (!alternate) return load_columns(row + first);
        const uint2 a = *(const uint2*)(row + first), b = whole() ? *(const uint2*)(row + second) : uint2{0, 0};
        return {low_half(a.x), high_half(a.x), low_half(a.y), high_half(a.y),
                low_half(b.x), high_half(b.x), low_half(b.y), high_half(b.y)};
    }

    __device__ __forceinline__ void store(u16* row, const Columns& x) const {
        if constexpr (!alternate) return store_columns(row + first, x);
        *(uint2*)(row + first) = {round_pair(x.v[0], x.v[1]), round_pair(x.v[2], x.v[3])};
        if (whole()) *(uint2*)(row + second) = {round_pair(x.v[4], x.v[5]), round_pair(x.v[6], x.v[7])};
    }

    // Of a row of gate and up, their bias added.
    __device__ __forceinline__ void load(const SwiGLUParams& a, const u16* row, const float* bias, Columns& gate,
                                         Columns& up) const {
        Columns b[2] = {};
        if constexpr (!alternate) {
            gate = load_columns(row + a.gate + first);
            up = load_columns(row + a.up + first);
            if (!bias) return;
            b[0] = load_columns(bias + a.gate + first);
            b[1] = load_columns(bias + a.up + first);
        } else {
            const Columns halves[2] = {load_columns(row + 2 * first), whole() ? load_columns(row + 2 * second) : b[1]};
            alternating(halves, gate, up);
            if (!bias) return;
            b[0] = load_columns(bias + 2 * first);
            if (whole()) b[1] = load_columns(bias + 2 * second);
            const Columns both[2] = {b[0], b[1]};
            alternating(both, b[0], b[1]);
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            gate.v[k] += b[0].v[k];
            up.v[k] += b[1].v[k];
        }
    }

    __device__ __forceinline__ void store(const SwiGLUParams& a, u16* row, const Columns& gate,
                                          const Columns& up) const {
        if constexpr (!alternate) {
            store_columns(row + a.gate + first, gate);
            store_columns(row + a.up + first, up);
        } else {
            Columns halves[2];
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                halves[k / 4].v[k % 4 * 2] = gate.v[k];
                halves[k / 4].v[k % 4 * 2 + 1] = up.v[k];
            }
            store_columns(row + 2 * first, halves[0]);
            if (whole()) store_columns(row + 2 * second, halves[1]);
        }
    }

private:
    static __device__ __forceinline__ void alternating(const Columns (&halves)[2], Columns& gate, Columns& up) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            gate.v[k] = halves[k / 4].v[k % 4 * 2];
            up.v[k] = halves[k / 4].v[k % 4 * 2 + 1];
        }
    }
};

// hidden = activation * router weight; zeros in padding rows. gate_up_bias: [experts, 2 * width] fp32, or null.
template <bool alternate>
__global__ void __launch_bounds__(ROW_THREADS, 4)
    activation_forward(const __grid_constant__ ExpertRows own, const __grid_constant__ SwiGLUParams a,
                       const u16* gate_up, const float* gate_up_bias, u16* hidden) {
    each_row(own, false, [&](i64 row, int expert, bool valid) {
        u16* out = hidden + row * a.width;
        if (!valid) return store_zeros(out, a.width);
        const float weight = weight_of(own, row);
        const float* bias = gate_up_bias ? gate_up_bias + (i64)expert * 2 * a.width : nullptr;
        for (Trip<alternate> trip(a.width); trip.any(); trip.next()) {
            Columns gate, up, result;
            trip.load(a, gate_up + row * 2 * a.width, bias, gate, up);
#pragma unroll
            for (int k = 0; k < 8; ++k) result.v[k] = Swished(a, gate.v[k], up.v[k]).value() * weight;
            trip.store(out, result);
        }
    });
}

// The dot product of a row with its expert's bias.
__device__ __forceinline__ float dot_with_bias(const u16* row, const float* bias, int width) {
    float dot = 0;
    for (int i = lane_id() * 8; i < width; i += 256) {
        const Columns x = load_columns(row + i), b = load_columns(bias + i);
#pragma unroll
        for (int k = 0; k < 8; ++k) dot = __fmaf_rn(x.v[k], b.v[k], dot);
    }
    return dot;
}

// In place: gate_up becomes its gradient; d_hidden, the gradient of the weighted activation, becomes that activation as
// the forward rounds it. Both are zeros in padding rows. d_weight: [rows], of the router weights, or null.
// down_bias: [experts, hidden_size] fp32, or null; weighted like the activation, so that d_out counts in d_weight.
template <bool alternate>
__global__ void __launch_bounds__(ROW_THREADS, 4)
    activation_backward(const __grid_constant__ ExpertRows own, const __grid_constant__ SwiGLUParams a, u16* gate_up,
                        u16* d_hidden, const float* gate_up_bias, const u16* d_out, const float* down_bias,
                        int hidden_size, float* d_weight) {
    each_row(own, false, [&](i64 row, int expert, bool valid) {
        u16 *both = gate_up + row * 2 * a.width, *one = d_hidden + row * a.width;
        if (!valid) {
            store_zeros(both, 2 * a.width);
            return store_zeros(one, a.width);
        }
        const float weight = weight_of(own, row);
        const float* bias = gate_up_bias ? gate_up_bias + (i64)expert * 2 * a.width : nullptr;
        float dot = 0;
        for (Trip<alternate> trip(a.width); trip.any(); trip.next()) {
            Columns gate, up, d = trip.load(one);
            trip.load(a, both, bias, gate, up);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const Swished act(a, gate.v[k], up.v[k]);
                const float value = act.value(), d_value = d.v[k] * weight;
                dot = __fmaf_rn(d.v[k], value, dot);
                d.v[k] = value * weight;
                gate.v[k] = act.gate_passes ? d_value * act.up * act.glu_of_gate : 0.0f;
                up.v[k] = act.up_passes ? d_value * act.glu : 0.0f;
            }
            trip.store(one, d);
            trip.store(a, both, gate, up);
        }
        if (!d_weight) return;
        const float* biases = down_bias + (i64)expert * hidden_size;
        if (down_bias) dot += dot_with_bias(d_out + row * hidden_size, biases, hidden_size);
        dot = sum_of_warp(dot);
        if (lane_id() == 0) d_weight[row] = dot;
    });
}

// out = rows * router weight; zeros in padding rows.
__global__ void __launch_bounds__(ROW_THREADS, 4)
    weigh_rows(const __grid_constant__ ExpertRows own, const u16* rows, int width, u16* out) {
    each_row(own, false, [&](i64 row, int, bool valid) {
        if (!valid) return store_zeros(out + row * width, width);
        const float weight = weight_of(own, row);
        for (int i = lane_id() * 8; i < width; i += 256) {
            Columns x = load_columns(rows + row * width + i);
#pragma unroll
            for (int k = 0; k < 8; ++k) x.v[k] *= weight;
            store_columns(out + row * width + i, x);
        }
    });
}

// The backward of weigh_rows. d_rows: the gradient of its result, becomes that of its rows, in place.
__global__ void __launch_bounds__(ROW_THREADS, 4)
    weigh_rows_backward(const __grid_constant__ ExpertRows own, const u16* rows, int width, u16* d_rows,
                        float* d_weight) {
    each_row(own, false, [&](i64 row, int, bool valid) {
        if (!valid) return;
        const float weight = weight_of(own, row);
        float dot = 0;
        for (int i = lane_id() * 8; i < width; i += 256) {
            const Columns x = load_columns(rows + row * width + i);
            Columns d = load_columns(d_rows + row * width + i);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                dot = __fmaf_rn(d.v[k], x.v[k], dot);
                d.v[k] *= weight;
            }
            store_columns(d_rows + row * width + i, d);
        }
        dot = sum_of_warp(dot);
        if (lane_id() == 0) d_weight[row] = dot;
    });
}

// Zeros into padding rows. tail: also into those behind the last expert's.
__global__ void __launch_bounds__(ROW_THREADS, 4)
    zero_padding(const __grid_constant__ ExpertRows own, u16* rows, int width, int tail) {
    each_row(own, tail, [&](i64 row, int, bool valid) {
        if (!valid) store_zeros(rows + row * width, width);
    });
}

// rows += bias * router weight. bias: [experts, width] fp32.
__global__ void __launch_bounds__(ROW_THREADS, 4)
    add_bias(const __grid_constant__ ExpertRows own, const float* bias, int width, u16* rows) {
    each_row(own, false, [&](i64 row, int expert, bool valid) {
        if (!valid) return;
        const float weight = weight_of(own, row);
        for (int i = lane_id() * 8; i < width; i += 256) {
            Columns x = load_columns(rows + row * width + i);
            const Columns b = load_columns(bias + (i64)expert * width + i);
#pragma unroll
            for (int k = 0; k < 8; ++k) x.v[k] = __fmaf_rn(b.v[k], weight, x.v[k]);
            store_columns(rows + row * width + i, x);
        }
    });
}

// sums = the sum over an expert's rows of row * router weight: [experts, width] fp32. Blocks (columns, expert).
__global__ void __launch_bounds__(ROW_THREADS, 4)
    sum_rows(const __grid_constant__ ExpertRows own, const u16* rows, int width, float* sums) {
    constexpr int LANES = SUM_COLUMNS / 8;
    __shared__ float partial[SUM_ROWS][SUM_COLUMNS];
    const int expert = blockIdx.y, first = blockIdx.x * SUM_COLUMNS, lane = threadIdx.x % LANES;
    const int column = first + lane * 8, begin = own.start[expert], count = own.count[expert];
    Columns sum = {};
    if (column < width) {
#pragma unroll 4
        for (int i = threadIdx.x / LANES; i < count; i += SUM_ROWS) {
            const i64 row = begin + i;
            const float weight = weight_of(own, row);
            const Columns x = load_columns(rows + row * width + column);
#pragma unroll
            for (int k = 0; k < 8; ++k) sum.v[k] = __fmaf_rn(x.v[k], weight, sum.v[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) partial[threadIdx.x / LANES][lane * 8 + k] = sum.v[k];
    __syncthreads();
    if (threadIdx.x >= SUM_COLUMNS || first + threadIdx.x >= width) return;
    float total = 0;
#pragma unroll
    for (int i = 0; i < SUM_ROWS; ++i) total = __fadd_rn(total, partial[i][threadIdx.x]);
    sums[(i64)expert * width + first + threadIdx.x] = total;
}

}  // namespace moeloom
