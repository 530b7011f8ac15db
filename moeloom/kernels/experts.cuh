// The experts of a rank: rows -> gate and up -> activation, weighted, rounded or quantised -> down. Two kernels, each
// a product of all experts with what follows it in place. Counts are read on the device; rows of padding are neither
// read for nor written.
#pragma once
#include "tiles.cuh"

namespace moeloom {

constexpr int EXPERTS_THREADS = MATH_THREADS + WARPGROUP;
constexpr int WEIGH_THREADS = 256;
constexpr int PIECE_BYTES = 128;            // of a row, as it is written out
constexpr int PIECE_PITCH = PIECE_BYTES + 16;  // in shared memory: rows begin in different banks
constexpr int WIDE_PITCH = 2 * BLOCK + 16;     // the same for 128 bf16 values
constexpr float E4M3_MAX = 448.0f, SMALLEST_AMAX = 1.2037062152420224e-35f;  // 2^-116

// Half the columns of a product each: gate and up, or columns 256 n and 256 n + 128 of down.
struct Bias {
    const void* values;  // [slot, ...], null if there is none
    i64 slot;            // stride
    int begin[2], step;  // of each half
    int is_bf16;
};

struct ExpertsParams {
    Operands operands;
    Tiles tiles;
    const float* row_weight;
    char* out;
    u32* other_ticket;  // of the other kernel, which does not run now: made 0 here
    i64 out_pitch;      // bytes
    Bias bias;
    int out_columns;
    int scales_begin;   // bytes: where in a row of `out` the scales are
    float clamp, slope, up_offset;  // of the activation; clamp 0: none; slope: -alpha log2(e)
    int weigh_rows, weigh_out;      // the router weight applies to what goes in; to the activation, or the bias of down
};

struct ExpertsShared {
    TileShared tiles;
    alignas(16) char staged[MATH_WARPS][16 * PIECE_PITCH];
    float amax[MATH_WARPS][64];
};

static_assert(sizeof(ExpertsShared::staged) >= 64 * WIDE_PITCH);

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// NaN stays NaN.
__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }

__device__ __forceinline__ float at_least(float x, float limit) { return x < limit ? limit : x; }

// weight * silu(gate) * up and the like, in place of gate.
template <int count>
__device__ __forceinline__ void activate(const ExpertsParams& p, float* gate, float* up) {
    if (p.clamp != 0) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            gate[i] = at_most(gate[i], p.clamp);
            up[i] = at_least(at_most(up[i], p.clamp), -p.clamp);
        }
    }
    if (p.up_offset != 0) {
#pragma unroll
        for (int i = 0; i < count; ++i) up[i] += p.up_offset;
    }
#pragma unroll
    for (int i = 0; i < count; ++i) gate[i] = gate[i] * reciprocal(1.0f + exp2_of(gate[i] * p.slope)) * up[i];
}

__device__ __forceinline__ float bias_at(const Bias& bias, i64 index) {
    if (!bias.is_bf16) return __ldg((const float*)bias.values + index);
    return __uint_as_float((u32)__ldg((const u16*)bias.values + index) << 16);
}

// Of one column of a half: 0 beyond the last.
__device__ __forceinline__ float bias_of(const ExpertsParams& p, int slot, int half, int column) {
    if (column >= p.out_columns) return 0;
    return bias_at(p.bias, slot * p.bias.slot + p.bias.begin[half] + (i64)column * p.bias.step);
}

__device__ __forceinline__ u16 e4m3_pair(float first, float second) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ __forceinline__ u32 bf16_pair(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// What follows a product. Columns are counted within this kernel's output.
template <Values values, Phase phase>
struct Finish {
    static constexpr bool quantises = values == Values::e4m3 && phase == Phase::up_gate;
    static constexpr int value_bytes = quantises ? 1 : 2;

    const ExpertsParams& p;
    ExpertsShared& s;
    const Multiplier& m;

    __device__ __forceinline__ float row_weight(const Tile& tile, int row) const {
        return row < tile.rows ? __ldg(p.row_weight + tile.row + row) : 0.0f;
    }

    __device__ __forceinline__ char* row_out(const Tile& tile, int row) const {
        return p.out + (i64)(tile.row + row) * p.out_pitch;
    }

    // Rows [0, rows) of a large tile, each 64 columns of both halves.
    __device__ __forceinline__ void large(const Tile& tile, float (&sums)[128]) const {
        const int row = m.first_row();
        float2 weight = {1, 1};
        if (p.weigh_out) weight = {row_weight(tile, row), row_weight(tile, row + 8)};
        if (p.bias.values) large_bias(tile, sums, weight);
        if constexpr (phase == Phase::down) {
            write_large<4>(tile, sums, 2 * tile.column * BLOCK);
            return;
        } else {
            activate<64>(p, sums, sums + 64);
#pragma unroll
            for (int i = 0; i < 64; ++i) sums[i] *= i & 2 ? weight.y : weight.x;
            if constexpr (quantises)
                quantise_large(tile, sums);
            else
                write_large<2>(tile, sums, tile.column * BLOCK);
        }
    }

    __device__ __forceinline__ void large_bias(const Tile& tile, float (&sums)[128], float2 weight) const {
#pragma unroll
        for (int i = 0; i < 128; i += 4) {
            const int half = i / 64, column = column_block<phase>(tile, half) * BLOCK + m.first_column() + i % 64 * 2;
            const float first = bias_of(p, tile.expert, half, column);
            const float second = bias_of(p, tile.expert, half, column + 1);
            const float2 w = phase == Phase::down ? weight : float2{1, 1};
            sums[i] += first * w.x;
            sums[i + 1] += second * w.x;
            sums[i + 2] += first * w.y;
            sums[i + 3] += second * w.y;
        }
    }

    __device__ __forceinline__ void quantise_large(const Tile& tile, const float (&x)[128]) const {
        float upper = SMALLEST_AMAX, lower = SMALLEST_AMAX;
#pragma unroll
        for (int i = 0; i < 64; i += 4) {
            upper = fmaxf(upper, fmaxf(fabsf(x[i]), fabsf(x[i + 1])));
            lower = fmaxf(lower, fmaxf(fabsf(x[i + 2]), fabsf(x[i + 3])));
        }
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            upper = fmaxf(upper, __shfl_xor_sync(~0u, upper, lanes));
            lower = fmaxf(lower, __shfl_xor_sync(~0u, lower, lanes));
        }
        const int row = m.first_row();
        if (m.lane() % 4 == 0) {
            if (row < tile.rows) write_scale(tile, row, upper);
            if (row + 8 < tile.rows) write_scale(tile, row + 8, lower);
        }
        const float x_factor = __fdiv_rn(E4M3_MAX, upper), y_factor = __fdiv_rn(E4M3_MAX, lower);
        char* to = s.staged[m.thread / 32] + m.lane() / 4 * PIECE_PITCH + m.first_column();
#pragma unroll
        for (int i = 0; i < 64; i += 4) {
            *(u16*)(to + 2 * i) = e4m3_pair(x[i] * x_factor, x[i + 1] * x_factor);
            *(u16*)(to + 8 * PIECE_PITCH + 2 * i) = e4m3_pair(x[i + 2] * y_factor, x[i + 3] * y_factor);
        }
        write_warp_rows(tile, tile.column * BLOCK);
    }

    __device__ __forceinline__ void write_scale(const Tile& tile, int row, float amax) const {
        *(float*)(row_out(tile, row) + p.scales_begin + 4 * tile.column) = __fdiv_rn(amax, E4M3_MAX);
    }

    // bf16, 64 columns after the other.
    template <int pieces>
    __device__ __forceinline__ void write_large(const Tile& tile, const float (&x)[128], int column) const {
        char* to = s.staged[m.thread / 32] + m.lane() / 4 * PIECE_PITCH + 2 * m.first_column();
#pragma unroll
        for (int piece = 0; piece < pieces; ++piece) {
#pragma unroll
            for (int i = 0; i < 32; i += 4) {
                const float* from = x + 32 * piece + i;
                *(u32*)(to + 4 * i) = bf16_pair(from[0], from[1]);
                *(u32*)(to + 8 * PIECE_PITCH + 4 * i) = bf16_pair(from[2], from[3]);
            }
            write_warp_rows(tile, column + 64 * piece);
        }
    }

    // The 16 rows of a warp, 128 bytes each, from its place.
    __device__ __forceinline__ void write_warp_rows(const Tile& tile, int column) const {
        const int row = m.thread / 32 * 16 + m.lane() / 8, byte = m.lane() % 8 * 16;
        const char* from = s.staged[m.thread / 32] + m.lane() / 8 * PIECE_PITCH + byte;
        char* to = row_out(tile, row) + column * value_bytes + byte;
        const bool inside = column * value_bytes + byte < p.out_columns * value_bytes;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            if (inside && row + i < tile.rows) *(Vector*)(to + i * p.out_pitch) = *(const Vector*)(from + i * PIECE_PITCH);
        }
        __syncwarp();
    }

    // Columns 64 group + 16 warp + lane / 4 and that + 8 of both halves, of `tile.tokens` tokens.
    template <int count>
    __device__ __forceinline__ void small(const Tile& tile, float (&first)[count], float (&second)[count]) const {
        if (p.bias.values) {
            small_bias(tile, 0, first);
            small_bias(tile, 1, second);
        }
        if constexpr (phase == Phase::down) {
            write_small(tile, first, 2 * tile.column * BLOCK);
            write_small(tile, second, (2 * tile.column + 1) * BLOCK);
            return;
        } else {
            activate<count>(p, first, second);
            if (p.weigh_out) {
#pragma unroll
                for (int i = 0; i < count; ++i) first[i] *= row_weight(tile, token_of(i));
            }
            if constexpr (quantises)
                quantise_small(tile, first);
            else
                write_small(tile, first, tile.column * BLOCK);
        }
    }

    // Of the i-th number that this thread holds.
    __device__ __forceinline__ int token_of(int i) const { return m.first_column() + i / 4 * 8 + i % 2; }

    template <int count>
    __device__ __forceinline__ void small_bias(const Tile& tile, int half, float (&sums)[count]) const {
        const int column = column_block<phase>(tile, half) * BLOCK + m.first_row();
        const float upper = bias_of(p, tile.expert, half, column), lower = bias_of(p, tile.expert, half, column + 8);
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const float weight = phase == Phase::down && p.weigh_out ? row_weight(tile, token_of(i)) : 1.0f;
            sums[i] += (i & 2 ? lower : upper) * weight;
        }
    }

    template <int count>
    __device__ __forceinline__ void quantise_small(const Tile& tile, const float (&x)[count]) const {
        float amax[count / 2];
#pragma unroll
        for (int i = 0; i < count / 2; ++i) {
            const int at = i / 2 * 4 + i % 2;
            amax[i] = fmaxf(fabsf(x[at]), fabsf(x[at + 2]));
            for (int lanes = 4; lanes < 32; lanes *= 2) amax[i] = fmaxf(amax[i], __shfl_xor_sync(~0u, amax[i], lanes));
            if (m.lane() < 4) s.amax[m.thread / 32][token_of(at)] = amax[i];
        }
        sync_threads(MATH_BARRIER, MATH_THREADS);
        char* to = s.staged[0] + m.first_row();
#pragma unroll
        for (int i = 0; i < count / 2; ++i) {
            const int at = i / 2 * 4 + i % 2, token = token_of(at);
            float all = SMALLEST_AMAX;
#pragma unroll
            for (int warp = 0; warp < MATH_WARPS; ++warp) all = fmaxf(all, s.amax[warp][token]);
            const float factor = __fdiv_rn(E4M3_MAX, all);
            const u16 pair = e4m3_pair(x[at] * factor, x[at + 2] * factor);
            to[token * PIECE_PITCH] = (char)pair;
            to[token * PIECE_PITCH + 8] = (char)(pair >> 8);
            if (m.thread < 4 && token < tile.rows) write_scale(tile, token, all);
        }
        write_tokens<PIECE_PITCH>(tile, tile.column * BLOCK);
    }

    template <int count>
    __device__ __forceinline__ void write_small(const Tile& tile, const float (&x)[count], int column) const {
        sync_threads(MATH_BARRIER, MATH_THREADS);
        char* to = s.staged[0] + 2 * m.first_row();
#pragma unroll
        for (int i = 0; i < count; i += 4) {
            char* token = to + token_of(i) * WIDE_PITCH;
            const u32 upper = bf16_pair(x[i], x[i + 1]), lower = bf16_pair(x[i + 2], x[i + 3]);
            *(u16*)token = (u16)upper;
            *(u16*)(token + WIDE_PITCH) = (u16)(upper >> 16);
            *(u16*)(token + 16) = (u16)lower;
            *(u16*)(token + WIDE_PITCH + 16) = (u16)(lower >> 16);
        }
        write_tokens<WIDE_PITCH>(tile, column);
    }

    // 128 columns of the tile's tokens, from where all warps have put them.
    template <int pitch>
    __device__ __forceinline__ void write_tokens(const Tile& tile, int column) const {
        constexpr int vectors = BLOCK * value_bytes / 16;
        sync_threads(MATH_BARRIER, MATH_THREADS);
        for (int i = m.thread; i < tile.rows * vectors; i += MATH_THREADS) {
            const int row = i / vectors, byte = i % vectors * 16;
            if (column * value_bytes + byte < p.out_columns * value_bytes)
                *(Vector*)(row_out(tile, row) + column * value_bytes + byte) =
                    *(const Vector*)(s.staged[0] + row * pitch + byte);
        }
        sync_threads(MATH_BARRIER, MATH_THREADS);
    }
};

template <Values values, Phase phase>
__device__ __forceinline__ void produce_tiles(const ExpertsParams& p, ExpertsShared& s) {
    Producer producer;
    Position<TILE_PLACES> told;
    Walk walk(p.tiles);
    u32 ticket = blockIdx.x;
    for (;;) {
        const Tile tile = walk.find(ticket);
        u32 drawn = 0;
        if (lane_id() == 0) {
            told.await_empty(s.tiles.told);
            s.tiles.tiles[told.place()] = tile;
            arrive(&s.tiles.told.full[told.place()]);
            if (tile.tokens)
                producer.load<values, phase>(s.tiles, p.operands, tile,
                                             [&] { drawn = gridDim.x + atomicAdd(p.tiles.ticket, 1); });
        }
        __syncwarp();
        if (!tile.tokens) return;
        ++told.count;
        ticket = __shfl_sync(~0u, drawn, 0);
    }
}

// Of the columns of each half.
template <Phase phase>
__device__ __forceinline__ const float* scales_of(const Operands& o, const Tile& tile, int half) {
    const int block = min(o.scale_begin[half] + column_block<phase>(tile, half), o.scale_last);
    return o.weight_scale + tile.expert * o.scale_slot + block * o.scale_block;
}

template <Values values, Phase phase, int tokens>
__device__ __forceinline__ void finish_tile(const ExpertsParams& p, ExpertsShared& s, Multiplier& m, const Tile& tile) {
    const Finish<values, phase> finish{p, s, m};
    const int steps = p.operands.steps;
    const float *scale_0, *scale_1;
    if constexpr (values == Values::e4m3) {
        scale_0 = scales_of<phase>(p.operands, tile, 0), scale_1 = scales_of<phase>(p.operands, tile, 1);
        if (p.weigh_rows) {
            if (m.thread < tokens) s.tiles.factors[m.thread] = finish.row_weight(tile, m.thread);
            sync_threads(MATH_BARRIER, MATH_THREADS);
        }
    }
    if constexpr (tokens == LARGE) {
        float sums[128];
        if constexpr (values == Values::e4m3)
            m.large_e4m3(sums, scale_0, scale_1, steps, p.weigh_rows);
        else
            m.large_bf16(sums, steps);
        finish.large(tile, sums);
    } else {
        float first[tokens / 2], second[tokens / 2];
        if constexpr (values == Values::e4m3)
            m.small_e4m3(first, second, scale_0, scale_1, steps, p.weigh_rows);
        else
            m.small_bf16(first, second, steps);
        finish.small(tile, first, second);
    }
    if (values == Values::e4m3 && p.weigh_rows) sync_threads(MATH_BARRIER, MATH_THREADS);
}

template <Values values, Phase phase>
__device__ __forceinline__ void finish_tiles(const ExpertsParams& p, ExpertsShared& s) {
    Multiplier m(s.tiles);
    for (Position<TILE_PLACES> told;; ++told.count) {
        told.await_full(s.tiles.told);
        m.forget();
        const Tile& tile = s.tiles.tiles[told.place()];
        if (tile.tokens == LARGE)
            finish_tile<values, phase, LARGE>(p, s, m, tile);
        else if (tile.tokens == 64)
            finish_tile<values, phase, 64>(p, s, m, tile);
        else if (tile.tokens == 32)
            finish_tile<values, phase, 32>(p, s, m, tile);
        else if (tile.tokens == 16)
            finish_tile<values, phase, 16>(p, s, m, tile);
        else if (tile.tokens == 8)
            finish_tile<values, phase, 8>(p, s, m, tile);
        else
            return;
        m.release(&s.tiles.told.empty[told.place()]);
    }
}

template <Values values, Phase phase>
__global__ void __launch_bounds__(EXPERTS_THREADS, 1) experts_product(const __grid_constant__ ExpertsParams p) {
    extern __shared__ __align__(1024) char memory[];
    ExpertsShared& s = *(ExpertsShared*)memory;
    if (threadIdx.x == 0) {
        s.tiles.loaded.init(MATH_WARPS);
        s.tiles.scaled.init(MATH_WARPS);
        s.tiles.told.init(MATH_WARPS);
        show_barriers();
        if (blockIdx.x == 0) *p.other_ticket = 0;
    }
    __syncthreads();
    if (threadIdx.x >= MATH_THREADS) {
        give_registers<40>();
        if (threadIdx.x < MATH_THREADS + 32) produce_tiles<values, phase>(p, s);
    } else {
        take_registers<232>();
        finish_tiles<values, phase>(p, s);
    }
}

// bf16 rows times the router weight, rounded: for models that weigh what goes into the experts.
__global__ void __launch_bounds__(WEIGH_THREADS) weigh_rows(const Vector* rows, const int* expert_start,
                                                            const int* expert_rows, const float* row_weight, Vector* out,
                                                            i64 pitch, int vectors, int num_slots) {
    for (int slot = 0; slot < num_slots; ++slot) {
        const int first = __ldg(expert_start + slot), count = __ldg(expert_rows + slot);
        for (int i = blockIdx.x; i < count; i += gridDim.x) {
            const i64 row = first + i;
            const float weight = __ldg(row_weight + row);
            for (int v = threadIdx.x; v < vectors; v += WEIGH_THREADS) {
                Vector x = rows[row * pitch + v];
                for (u32* word = &x.x; word <= &x.w; ++word)
                    *word = bf16_pair(__uint_as_float(*word << 16) * weight, __uint_as_float(*word & ~0xFFFFu) * weight);
                out[row * vectors + v] = x;
            }
        }
    }
}

}  // namespace moeloom
