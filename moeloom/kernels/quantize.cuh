// quantize: rows to records of E4M3 values and fp32 scales, and weights to values with a scale for 128 x 128 of them.
//
// The arithmetic is that of moeloom/quantize.py to the bit: amax = max(|x|, 2^-116) ignoring NaN, scale = amax / 448,
// value = x * (448 / amax) to the nearest, ties to even, limited to +-448.
#pragma once
#include "signals.cuh"

namespace moeloom {

constexpr int QUANTIZE_WARPS = 8, QUANTIZE_THREADS = 32 * QUANTIZE_WARPS;
constexpr int SCALE_GROUP = 128;                   // values that share a scale: half a warp has eight in each lane
constexpr int SPAN_LOADS = 4, SPAN = SPAN_LOADS * 256;  // values of a row that a warp quantises at once
constexpr int BLOCK_ROWS = QUANTIZE_THREADS / 16;  // of a block of weights, loaded at once
constexpr int BLOCK_LOADS = SCALE_GROUP / BLOCK_ROWS;
constexpr float E4M3_MAX = 448.0f, SMALLEST_AMAX = 0x1p-116f;

struct QuantizeParams {
    const char* x;
    char* records;
    const int* device_num_tokens;  // or null: all rows count
    i64 x_stride, record_stride;   // bytes
    int num_rows, hidden, record_bytes;
};

// A slot's rows are those of one matrix, or of two (gate and up), each with blocks of its own. Strides in bytes.
struct BlocksParams {
    const char* weight;
    char* values;
    float* scales;  // [slots, matrices, row_blocks, column_blocks]
    i64 weight_slot, weight_matrix, weight_row;
    i64 values_slot, values_matrix, values_row;
    int num_matrices, num_rows, num_columns;
};

// The larger magnitudes of two bf16 each; of NaN and a number, the number.
__device__ __forceinline__ u32 max_of_pairs(u32 a, u32 b) {
    u32 larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
    return larger;
}

// Eight numbers as they lie in memory: fp32, or bf16 as u16.
template <class Number>
struct Eight {
    Vector loaded[sizeof(Number) / 2];

    __device__ __forceinline__ void load(const char* from) {
#pragma unroll
        for (int i = 0; i < (int)sizeof(Number) / 2; ++i)
            asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                : "=r"(loaded[i].x), "=r"(loaded[i].y), "=r"(loaded[i].z), "=r"(loaded[i].w)
                : "l"(from + 16 * i));
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < (int)sizeof(Number) / 2; ++i) loaded[i] = {0, 0, 0, 0};
    }

    __device__ __forceinline__ float operator[](int i) const {
        const Vector& v = loaded[i * sizeof(Number) / 16];
        const int place = i * sizeof(Number) / 4 % 4;
        const u32 word = place == 0 ? v.x : place == 1 ? v.y : place == 2 ? v.z : v.w;
        if (sizeof(Number) == 4) return __uint_as_float(word);
        return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    }

    // Of them and of what is known already, without NaN.
    __device__ __forceinline__ float amax(float known) const {
        if constexpr (sizeof(Number) == 2) {
            // two at a time, so that they need not be kept in fp32 until they are quantised
            const Vector& v = loaded[0];
            const u32 pair = max_of_pairs(max_of_pairs(v.x, v.y), max_of_pairs(v.z, v.w));
            return fmaxf(known, fmaxf(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)));
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) known = fmaxf(known, fabsf((*this)[i]));
            return known;
        }
    }

    __device__ __forceinline__ uint2 quantized(float factor) const {
        u32 words[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u16 low, high;
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
                : "=h"(low)
                : "f"(__fmul_rn((*this)[4 * i + 1], factor)), "f"(__fmul_rn((*this)[4 * i], factor)));
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
                : "=h"(high)
                : "f"(__fmul_rn((*this)[4 * i + 3], factor)), "f"(__fmul_rn((*this)[4 * i + 2], factor)));
            words[i] = (u32)high << 16 | low;
        }
        return {words[0], words[1]};
    }
};

__device__ __forceinline__ float max_with(float mine, float sent, int distance) {
    return fmaxf(mine, __shfl_xor_sync(~0u, sent, distance));
}

// Four maxima over each half of a warp: lane l gets the one of load l % 4. Each exchange halves what a lane looks after.
__device__ __forceinline__ float max_of_loads(const float (&amax)[4]) {
    const bool odd = lane_id() & 1, high = lane_id() & 2;
    const float low_pair = max_with(odd ? amax[1] : amax[0], odd ? amax[0] : amax[1], 1);
    const float high_pair = max_with(odd ? amax[3] : amax[2], odd ? amax[2] : amax[3], 1);
    float mine = max_with(high ? high_pair : low_pair, high ? low_pair : high_pair, 2);
    mine = max_with(mine, mine, 4);
    return max_with(mine, mine, 8);
}

// A warp's part of a row: eight groups, and with the last of them the zeros that fill the record.
template <class Number>
__device__ __forceinline__ void quantize_span(const QuantizeParams& p, int row, int begin) {
    const int lane = lane_id();
    const char* from = p.x + row * p.x_stride;
    char* record = p.records + row * p.record_stride;
    Eight<Number> x[SPAN_LOADS];
#pragma unroll
    for (int i = 0; i < SPAN_LOADS; ++i) {
        const int column = begin + 256 * i + 8 * lane;
        if (column < p.hidden)
            x[i].load(from + (i64)column * sizeof(Number));
        else
            x[i].clear();
    }
    float amax[SPAN_LOADS];
#pragma unroll
    for (int i = 0; i < SPAN_LOADS; ++i) amax[i] = x[i].amax(SMALLEST_AMAX);

    // lane l has load l % 4 of its half: it alone divides, and the others ask it
    const float mine = max_of_loads(amax);
    const float factor = __fdiv_rn(E4M3_MAX, mine);
#pragma unroll
    for (int i = 0; i < SPAN_LOADS; ++i) {
        const int column = begin + 256 * i + 8 * lane;
        const uint2 values = x[i].quantized(__shfl_sync(~0u, factor, (lane & 16) | i));
        if (column < p.hidden) *(uint2*)(record + column) = values;
    }

    const int group = begin / SCALE_GROUP + 2 * (lane & 3) + lane / 16;
    const int groups = (p.hidden + SCALE_GROUP - 1) / SCALE_GROUP;
    float* scales = (float*)(record + p.hidden);
    if ((lane & 15) < SPAN_LOADS && group < groups) scales[group] = __fdiv_rn(mine, E4M3_MAX);
    if (begin + SPAN >= p.hidden && groups + lane < (p.record_bytes - p.hidden) / 4) scales[groups + lane] = 0.0f;
}

template <class Number>
__global__ void __launch_bounds__(QUANTIZE_THREADS, sizeof(Number) == 2 ? 6 : 4)
    quantize_rows(const __grid_constant__ QuantizeParams p) {
    const u32 spans = (p.hidden + SPAN - 1) / SPAN;
    const u32 unit = blockIdx.x * QUANTIZE_WARPS + threadIdx.x / 32, row = unit / spans;
    if (row < p.num_rows && (!p.device_num_tokens || (int)row < *p.device_num_tokens))
        quantize_span<Number>(p, row, unit % spans * SPAN);
}

// One block of the grid for each block of 128 x 128.
template <class Number>
__global__ void __launch_bounds__(QUANTIZE_THREADS, sizeof(Number) == 2 ? 4 : 2)
    quantize_blocks(const __grid_constant__ BlocksParams p) {
    __shared__ float amax_of_warp[QUANTIZE_WARPS];
    const u32 column_blocks = (p.num_columns + SCALE_GROUP - 1) / SCALE_GROUP;
    const u32 row_blocks = (p.num_rows + SCALE_GROUP - 1) / SCALE_GROUP;
    const u32 matrix = blockIdx.x / column_blocks / row_blocks;
    const i64 slot = matrix / p.num_matrices, half = matrix % p.num_matrices;
    const int first_row = blockIdx.x / column_blocks % row_blocks * SCALE_GROUP + threadIdx.x / 16;
    const int column = blockIdx.x % column_blocks * SCALE_GROUP + threadIdx.x % 16 * 8;
    const char* weight = p.weight + slot * p.weight_slot + half * p.weight_matrix + (i64)column * sizeof(Number);
    char* values = p.values + slot * p.values_slot + half * p.values_matrix + column;

    Eight<Number> x[BLOCK_LOADS];
#pragma unroll
    for (int i = 0; i < BLOCK_LOADS; ++i) {
        const int row = first_row + BLOCK_ROWS * i;
        if (row < p.num_rows && column < p.num_columns)
            x[i].load(weight + row * p.weight_row);
        else
            x[i].clear();
    }
    float amax = SMALLEST_AMAX;
#pragma unroll
    for (int i = 0; i < BLOCK_LOADS; ++i) amax = x[i].amax(amax);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) amax = max_with(amax, amax, distance);
    if (lane_id() == 0) amax_of_warp[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < QUANTIZE_WARPS; ++i) amax = fmaxf(amax, amax_of_warp[i]);

    const float factor = __fdiv_rn(E4M3_MAX, amax);
    if (threadIdx.x == 0) p.scales[blockIdx.x] = __fdiv_rn(amax, E4M3_MAX);
#pragma unroll
    for (int i = 0; i < BLOCK_LOADS; ++i) {
        const int row = first_row + BLOCK_ROWS * i;
        if (row < p.num_rows && column < p.num_columns)
            *(uint2*)(values + row * p.values_row) = x[i].quantized(factor);
    }
}

}  // namespace moeloom
