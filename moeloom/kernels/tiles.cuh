// One tile after the other: 256 columns of weights (two blocks of 128) times the rows of one expert. A producing warp
// finds tiles and has their operands copied; two warpgroups multiply. A tile of 128 tokens has the tokens as operand A,
// 64 of each warpgroup. One of 8 to 64 tokens has the weights as operand A, 64 of each block and warpgroup, and no
// more tokens than needed. Each number is the sum of the same products in the same order in all of them, so its bits
// do not depend on the tile, nor on the rows beside it.
#pragma once
#include "tma.cuh"
#include "wgmma.cuh"

namespace moeloom {

constexpr int LARGE = 128;       // tokens of a large tile
constexpr int SMALL_BOX = 16;    // rows copied at once for a small one
constexpr int BLOCK = 128;       // columns that share a scale of the weights
constexpr int STEP_BYTES = 128;  // of each row, in one step along the sum
constexpr int STAGES = 4;
constexpr int SCALE_STEPS = 4;   // steps whose scales of a row are copied at once
constexpr int SCALE_PLACES = 4;
constexpr int TILE_PLACES = 4;
constexpr int UNIT = 16;         // blocks of rows whose tiles run together, for the second-level cache
constexpr int MATH_WARPS = 8;
constexpr int MATH_THREADS = 32 * MATH_WARPS;
constexpr int MATH_BARRIER = 1;
constexpr int DRAW_STEPS = 6;    // before the end of a tile, when the next one is drawn

enum class Phase { up_gate, down };

// Rows [row, row + rows) of all, and the column-th 256 columns of the product. tokens: rows that the tile has room for.
struct Tile {
    int expert, row, rows, column, tokens;
};

// What a product of all experts is made of. rows: [R, depth], scales: [R, depth / 128], each as boxes of 128 and of 16
// rows; weights: [slot, half, row, depth].
struct Operands {
    TensorMap rows, few_rows, scales, few_scales, weights;
    const float* weight_scale;  // [slot, block of columns, step], the next two are its strides
    i64 scale_slot, scale_block;
    int scale_begin[2];  // block of the first column of each half
    int scale_last;      // blocks beyond it do not exist
    int steps;           // along the sum
    int swap_halves;
};

// The tiles of all experts, in their order.
struct Tiles {
    const int* expert_start;  // [slots + 1]
    const int* expert_rows;   // [slots]
    u32* ticket;              // tiles handed out beyond one for each block of the grid
    int num_slots, columns;   // tiles side by side
};

struct alignas(1024) TileStage {
    char weights[2][BLOCK * STEP_BYTES];
    char rows[LARGE * STEP_BYTES];
};

struct TileShared {
    TileStage stages[STAGES];
    float scales[SCALE_PLACES][LARGE][SCALE_STEPS];
    Ring<STAGES> loaded;
    Ring<SCALE_PLACES> scaled;
    Ring<TILE_PLACES> told;
    Tile tiles[TILE_PLACES];
    float factors[LARGE];  // weights of a tile's rows, where they apply to what goes in
};

__device__ __forceinline__ int small_tokens(int rows) { return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64; }

// By a warp: finds the tile of a ticket; tickets may only grow. Its lanes look at 32 experts at once.
struct Walk {
    const Tiles& tiles;
    int first = 0;    // expert of lane 0
    u32 before = 0;   // tiles of the experts before
    int rows;         // of this lane's expert
    u32 until;        // tiles of the experts up to and with it, from `before` on

    __device__ __forceinline__ explicit Walk(const Tiles& all) : tiles(all) { look(); }

    __device__ __forceinline__ void look() {
        const int expert = first + (int)lane_id();
        rows = expert < tiles.num_slots ? __ldg(tiles.expert_rows + expert) : 0;
        until = (u32)((rows + LARGE - 1) / LARGE) * tiles.columns;
        for (int d = 1; d < 32; d *= 2) {
            const u32 other = __shfl_up_sync(~0u, until, d);
            if (lane_id() >= d) until += other;
        }
    }

    __device__ __forceinline__ Tile find(u32 ticket) {
        for (;;) {
            const u32 all = __shfl_sync(~0u, until, 31);
            if (ticket - before < all) break;
            if (first + 32 >= tiles.num_slots) return {};
            before += all;
            first += 32;
            look();
        }
        const u32 later = __ballot_sync(~0u, ticket - before < until);
        const int lane = __ffs(later) - 1;
        const u32 skipped = __shfl_sync(~0u, until, lane ? lane - 1 : 0);
        return tile(first + lane, __shfl_sync(~0u, rows, lane), ticket - before - (lane ? skipped : 0));
    }

    // Blocks of rows in units; in a unit they take turns, so that neighbours share their weights.
    __device__ __forceinline__ Tile tile(int expert, int num_rows, int number) const {
        const int blocks = (num_rows + LARGE - 1) / LARGE;
        const int unit = number / (UNIT * tiles.columns), rest = number - unit * UNIT * tiles.columns;
        const int width = min(UNIT, blocks - unit * UNIT);
        const int column = rest / width, block = unit * UNIT + rest - column * width;
        const int rest_rows = min(LARGE, num_rows - block * LARGE);
        const int tokens = rest_rows > 64 ? LARGE : small_tokens(rest_rows);
        return {expert, __ldg(tiles.expert_start + expert) + block * LARGE, rest_rows, column, tokens};
    }
};

template <Phase phase>
__device__ __forceinline__ int column_block(const Tile& tile, int half) {
    return phase == Phase::up_gate ? tile.column : 2 * tile.column + half;
}

struct Producer {
    Position<STAGES> stage;
    Position<SCALE_PLACES> scale;

    // By one thread. at_draw: called once, when the next tile should be asked for.
    template <Values values, Phase phase, class Draw>
    __device__ __forceinline__ void load(TileShared& s, const Operands& o, const Tile& tile, Draw at_draw) {
        constexpr int elements = values == Values::e4m3 ? STEP_BYTES : STEP_BYTES / 2;
        const bool large = tile.tokens == LARGE;
        const int box = large ? LARGE : SMALL_BOX, rows = max(tile.tokens, SMALL_BOX);
        const TensorMap& row_map = large ? o.rows : o.few_rows;
        const TensorMap& scale_map = large ? o.scales : o.few_scales;
        const int draw_step = max(0, o.steps - DRAW_STEPS);
        for (int k = 0; k < o.steps; ++k) {
            if (k == draw_step) at_draw();
            stage.await_empty(s.loaded);
            TileStage& to = s.stages[stage.place()];
            u64* full = &s.loaded.full[stage.place()];
            announce(full, sizeof(to.weights) + rows * STEP_BYTES);
            for (int half = 0; half < 2; ++half) {
                const int row = column_block<phase>(tile, half) * BLOCK;
                const int which = phase == Phase::up_gate ? half ^ o.swap_halves : 0;
                load_box(to.weights[half], o.weights, full, k * elements, row, which, tile.expert);
            }
            for (int i = 0; i < rows; i += box)
                load_box(to.rows + i * STEP_BYTES, row_map, full, k * elements, tile.row + i);
            ++stage.count;
            if (values == Values::e4m3 && k % SCALE_STEPS == 0) {
                scale.await_empty(s.scaled);
                full = &s.scaled.full[scale.place()];
                announce(full, rows * sizeof(s.scales[0][0]));
                for (int i = 0; i < rows; i += box)
                    load_box(s.scales[scale.place()][i], scale_map, full, k, tile.row + i);
                ++scale.count;
            }
        }
    }
};

// Keeps the compiler from reading products before they are awaited.
template <int count>
__device__ __forceinline__ void hold(float (&d)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// One of two warpgroups. group: which.
struct Multiplier {
    TileShared& s;
    Position<STAGES> stage;
    Position<SCALE_PLACES> scale;
    int thread;

    __device__ __forceinline__ explicit Multiplier(TileShared& shared) : s(shared) {
        forget();
    }

    // What follows from the thread's number is worked out again for each tile, instead of filling registers during one.
    __device__ __forceinline__ void forget() { asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread)); }

    __device__ __forceinline__ int group() const { return thread / WARPGROUP; }

    __device__ __forceinline__ int lane() const { return thread % 32; }

    // Row of operand A that this thread has results of, beside that + 8.
    __device__ __forceinline__ int first_row() const { return thread / 32 * 16 + lane() / 4; }

    // The same of operand B, beside the next one and those 8 i further.
    __device__ __forceinline__ int first_column() const { return lane() % 4 * 2; }

    __device__ __forceinline__ void release(u64* empty) const {
        __syncwarp();
        if (lane() == 0) arrive(empty);
    }

    __device__ __forceinline__ void next_stage() {
        release(&s.loaded.empty[stage.place()]);
        ++stage.count;
    }

    __device__ __forceinline__ void end_scales(int k, int steps) {
        if (k % SCALE_STEPS != SCALE_STEPS - 1 && k != steps - 1) return;
        release(&s.scaled.empty[scale.place()]);
        ++scale.count;
    }

    // FP8, 64 tokens of each group. sums[64 h + i]: D of the h-th block. scale_0, scale_1: of the blocks' columns.
    // weigh: multiply the rows' scales with `factors`.
    __device__ __forceinline__ void large_e4m3(float (&sums)[128], const float* scale_0, const float* scale_1, int steps,
                                               bool weigh) {
        const int row = first_row();
#pragma unroll
        for (int i = 0; i < 128; ++i) sums[i] = 0;
#pragma unroll 1
        for (int k = 0; k < steps; ++k) {
            const float weight_0 = __ldg(scale_0 + k), weight_1 = __ldg(scale_1 + k);
            if (k % SCALE_STEPS == 0) scale.await_full(s.scaled);
            float upper = s.scales[scale.place()][row][k % SCALE_STEPS];
            float lower = s.scales[scale.place()][row + 8][k % SCALE_STEPS];
            if (weigh) upper *= s.factors[row], lower *= s.factors[row + 8];
            end_scales(k, steps);
            stage.await_full(s.loaded);
            const TileStage& from = s.stages[stage.place()];
            u32 tokens[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) hold_rows(tokens[i], shared_address(from.rows) + thread / 32 * 16 * STEP_BYTES, i);
            const u64 weights = operand(shared_address(from.weights[0]));
            float part[2][32];
            multiply_quarter(part[0], tokens, weights, 0);
#pragma unroll
            for (int quarter = 0; quarter < 4; ++quarter) {
                if (quarter < 3) {
                    multiply_quarter(part[1 - quarter % 2], tokens, weights, quarter + 1);
                    await_products<1>();
                } else {
                    await_products<0>();
                }
                hold(part[quarter % 2]);
                if (quarter == 3) next_stage();
                const float weight = quarter / 2 ? weight_1 : weight_0, x = upper * weight, y = lower * weight;
#pragma unroll
                for (int i = 0; i < 32; i += 4) {
                    float* sum = sums + 32 * quarter + i;
                    const float* p = part[quarter % 2] + i;
                    sum[0] = __fmaf_rn(p[0], x, sum[0]);
                    sum[1] = __fmaf_rn(p[1], x, sum[1]);
                    sum[2] = __fmaf_rn(p[2], y, sum[2]);
                    sum[3] = __fmaf_rn(p[3], y, sum[3]);
                }
            }
        }
    }

    // 64 columns.
    static __device__ __forceinline__ void multiply_quarter(float (&part)[32], const u32 (&tokens)[4][4], u64 weights, int quarter) {
        begin_products();
#pragma unroll
        for (int i = 0; i < 4; ++i) multiply_held(part, tokens[i], weights + quarter * (64 * STEP_BYTES / 16) + 2 * i, i);
        commit_products();
    }

    // The same of bf16 rows, all of a step in one product.
    __device__ __forceinline__ void large_bf16(float (&sums)[128], int steps) {
        const auto multiply_step = [&](const TileStage& from, int keep) {
            multiply_rows<Values::bf16>(sums, operand(shared_address(from.rows + group() * 64 * STEP_BYTES)),
                                        operand(shared_address(from.weights[0])), keep);
        };
        overlap_steps(steps, multiply_step);
        hold(sums);
    }

    // FP8, weights as operand A: 64 of each block and group.
    template <int count>
    __device__ __forceinline__ void small_e4m3(float (&sums_0)[count], float (&sums_1)[count], const float* scale_0,
                                               const float* scale_1, int steps, bool weigh) {
#pragma unroll
        for (int i = 0; i < count; ++i) sums_0[i] = sums_1[i] = 0;
#pragma unroll 1
        for (int k = 0; k < steps; ++k) {
            const float weight_0 = __ldg(scale_0 + k), weight_1 = __ldg(scale_1 + k);
            stage.await_full(s.loaded);
            const TileStage& from = s.stages[stage.place()];
            const u64 tokens = operand(shared_address(from.rows));
            float part_0[count], part_1[count], token_scale[count / 2];
            begin_products();
            multiply_rows<Values::e4m3>(part_0, operand(shared_address(from.weights[0] + group() * 64 * STEP_BYTES)), tokens, 0);
            multiply_rows<Values::e4m3>(part_1, operand(shared_address(from.weights[1] + group() * 64 * STEP_BYTES)), tokens, 0);
            commit_products();
            if (k % SCALE_STEPS == 0) scale.await_full(s.scaled);
#pragma unroll
            for (int i = 0; i < count / 2; ++i) {
                const int token = first_column() + i / 2 * 8 + i % 2;
                token_scale[i] = s.scales[scale.place()][token][k % SCALE_STEPS];
                if (weigh) token_scale[i] *= s.factors[token];
            }
            end_scales(k, steps);
            await_products<0>();
            hold(part_0);
            hold(part_1);
            next_stage();
            promote(sums_0, part_0, token_scale, weight_0);
            promote(sums_1, part_1, token_scale, weight_1);
        }
    }

    template <int count>
    __device__ __forceinline__ void promote(float (&sums)[count], const float (&part)[count],
                                            const float (&token_scale)[count / 2], float weight) const {
#pragma unroll
        for (int i = 0; i < count; i += 4) {
            const float x = token_scale[i / 2] * weight, y = token_scale[i / 2 + 1] * weight;
            sums[i] = __fmaf_rn(part[i], x, sums[i]);
            sums[i + 1] = __fmaf_rn(part[i + 1], y, sums[i + 1]);
            sums[i + 2] = __fmaf_rn(part[i + 2], x, sums[i + 2]);
            sums[i + 3] = __fmaf_rn(part[i + 3], y, sums[i + 3]);
        }
    }

    template <int count>
    __device__ __forceinline__ void small_bf16(float (&sums_0)[count], float (&sums_1)[count], int steps) {
        const auto multiply_step = [&](const TileStage& from, int keep) {
            const u64 tokens = operand(shared_address(from.rows));
            const u64 weights = operand(shared_address(from.weights[0] + group() * 64 * STEP_BYTES));
            multiply_rows<Values::bf16>(sums_0, weights, tokens, keep);
            multiply_rows<Values::bf16>(sums_1, weights + BLOCK * STEP_BYTES / 16, tokens, keep);
        };
        overlap_steps(steps, multiply_step);
        hold(sums_0);
        hold(sums_1);
    }

    // The products of a step are under way while those of the next are issued.
    template <class MultiplyStep>
    __device__ __forceinline__ void overlap_steps(int steps, MultiplyStep multiply_step) {
        start_step(multiply_step, 0);
#pragma unroll 1
        for (int k = 1; k < steps; ++k) {
            start_step(multiply_step, 1);
            await_products<1>();
            release(&s.loaded.empty[(stage.count - 2) % STAGES]);
        }
        await_products<0>();
        release(&s.loaded.empty[(stage.count - 1) % STAGES]);
    }

    template <class MultiplyStep>
    __device__ __forceinline__ void start_step(MultiplyStep multiply_step, int keep) {
        stage.await_full(s.loaded);
        begin_products();
        multiply_step(s.stages[stage.place()], keep);
        commit_products();
        ++stage.count;
    }
};

}  // namespace moeloom
