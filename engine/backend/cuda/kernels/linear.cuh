// out[T, N] = x[T, K] W[N, K]^T, for weights in one of the layouts of formats.cuh, accumulated in float32.
//
// A block of WR * WK * WM warps computes tiles of WR * RB * 16 rows of W by WM * MT * 8 tokens. In one step it advances
// WK * 128 columns: warp (wr, wk, wm) takes RB row blocks, one unit of columns and MT groups of 8 tokens. Weights are the
// A operand, so that a step costs the same for 1 to 8 tokens.
//
// Steps of all tiles form one sequence. `split` deals it out evenly by steps (stream-K): a block may begin and end
// inside a tile; it then leaves its partial sums in `partials`, and the last block to finish a tile adds them, always in
// the same order. Without `split` whole tiles are dealt out.
#pragma once
#include "formats.cuh"

//
// Tiles of tokens follow each other within a tile of rows: blocks that run together share the weights through the L2 cache.
struct LinearShape {
    int tokens, rows, columns;
    int token_tiles, tiles, k_steps;
    bool split;

    DEVICE i64 first_step(int block) const {
        if (split) return i64(tiles) * k_steps * block / gridDim.x;
        return i64(tiles) * block / gridDim.x * k_steps;
    }
};

template <class Format, int X_ROWS, int MT, int RB, int WR, int WK, int WM, int STAGES>
struct LinearKernel {
    static constexpr int THREADS = 32 * WR * WK * WM;
    static constexpr int TILE_TOKENS = WM * MT * 8;
    static constexpr int TILE_BLOCKS = WR * RB;
    static constexpr int X_STRIDE = WK * UNIT_COLUMNS * 2 + Format::X_PAD;
    static constexpr int WEIGHT_BYTES = TILE_BLOCKS * WK * Format::UNIT_BYTES;
    static constexpr int STAGE_BYTES = WEIGHT_BYTES + X_ROWS * X_STRIDE;
    static_assert(RB >= WM, "each token warp copies a share of the row blocks");

    const u8* weight;
    const u16* x;
    LinearShape shape;
    int units, lane, wr, wk, wm;
    u8* memory;

    DEVICE u8* weight_slot(int stage, int rb) const {
        return memory + stage * STAGE_BYTES + ((wr * RB + rb) * WK + wk) * Format::UNIT_BYTES;
    }
    DEVICE u8* x_slot(int stage) const { return memory + stage * STAGE_BYTES + WEIGHT_BYTES; }
    // A kernel with one token warp is used for no more tokens than one tile takes.
    DEVICE int row_tile(int tile) const { return WM == 1 ? tile : tile / shape.token_tiles; }
    DEVICE int row_block(int tile, int rb) const { return row_tile(tile) * TILE_BLOCKS + wr * RB + rb; }
    DEVICE int token_begin(int tile) const { return WM == 1 ? 0 : tile % shape.token_tiles * TILE_TOKENS; }
    DEVICE int token_count(int tile) const { return min(shape.tokens - token_begin(tile), TILE_TOKENS); }
    DEVICE bool has_unit(int tile, int rb, int step) const {
        return row_block(tile, rb) * BLOCK_ROWS < shape.rows && step * WK + wk < units;
    }

    DEVICE void load_weights(int stage, int tile, int step) const {
        for (int rb = wm; rb < RB; rb += WM)
            if (has_unit(tile, rb, step))
                Format::load_unit(shared_address(weight_slot(stage, rb)), weight, row_block(tile, rb), step * WK + wk, lane,
                                  shape.rows, shape.columns, units);
    }

    DEVICE void load_activations(int stage, int tile, int step) const {
        constexpr int CHUNKS = WK * UNIT_COLUMNS / 8;
        const u16* rows = x + i64(token_begin(tile)) * shape.columns;
        int count = token_count(tile);
        for (int i = threadIdx.x; i < count * CHUNKS; i += THREADS) {
            int token = i / CHUNKS, chunk = i % CHUNKS;
            int column = step * WK * UNIT_COLUMNS + chunk * 8;
            int bytes = min(max(shape.columns - column, 0), 8) * 2;
            const u16* source = rows + i64(token) * shape.columns + (bytes > 0 ? column : 0);
            u32 target = shared_address(x_slot(stage)) + token * X_STRIDE + chunk * 16;
            if ((shape.columns & 7) == 0) {
                copy_async_16_zero_filled(target, source, bytes);
            } else {
                for (int j = 0; j < 8; ++j) {
                    u16 value = j * 2 < bytes ? source[j] : u16(0);
                    asm volatile("st.shared.u16 [%0], %1;" ::"r"(target + j * 2), "h"(value) : "memory");
                }
            }
        }
    }

    DEVICE void multiply(int stage, int tile, int step, float (&sums)[RB][MT][4]) const {
        int g = lane >> 2, t = lane & 3, count = token_count(tile);
        if (!has_unit(tile, 0, step)) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 a[RB][4][4];
#pragma unroll
            for (int rb = 0; rb < RB; ++rb) {
                // A block past the last row repeats the first: its sums are not written.
                Format::fragments(weight_slot(stage, has_unit(tile, rb, step) ? rb : 0), half, lane, a[rb]);
            }
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                int first = (wm * MT + mt) * 8;
                if (first >= count) continue;
                const u8* row = x_slot(stage) + min(first + g, count - 1) * X_STRIDE + wk * UNIT_COLUMNS * 2 + half * 128;
                uint4 low = *reinterpret_cast<const uint4*>(row + Format::activation_offset(t, 0));
                uint4 high = *reinterpret_cast<const uint4*>(row + Format::activation_offset(t, 1));
#pragma unroll
                for (int rb = 0; rb < RB; ++rb) {
                    float(&d)[4] = sums[rb][mt];
                    mma_bf16(d, a[rb][0][0], a[rb][0][1], a[rb][0][2], a[rb][0][3], low.x, low.y);
                    mma_bf16(d, a[rb][1][0], a[rb][1][1], a[rb][1][2], a[rb][1][3], low.z, low.w);
                    mma_bf16(d, a[rb][2][0], a[rb][2][1], a[rb][2][2], a[rb][2][3], high.x, high.y);
                    mma_bf16(d, a[rb][3][0], a[rb][3][1], a[rb][3][2], a[rb][3][3], high.z, high.w);
                }
            }
        }
    }

    // Adds the sums of the WK warps that share a tile; the result is with wk = 0.
    DEVICE void add_columns(float4* scratch, float (&sums)[RB][MT][4]) const {
        if (WK == 1) return;
        int place = (wm * WR + wr) * RB * MT * 32 + lane;
        constexpr int PLANE = WM * WR * RB * MT * 32;
        if (wk > 0) {
#pragma unroll
            for (int i = 0; i < RB * MT; ++i) {
                float(&d)[4] = sums[i / MT][i % MT];
                scratch[(wk - 1) * PLANE + place + i * 32] = make_float4(d[0], d[1], d[2], d[3]);
            }
        }
        __syncthreads();
        if (wk == 0) {
#pragma unroll
            for (int other = 0; other < WK - 1; ++other) {
#pragma unroll
                for (int i = 0; i < RB * MT; ++i) {
                    float4 part = scratch[other * PLANE + place + i * 32];
                    float(&d)[4] = sums[i / MT][i % MT];
                    d[0] += part.x, d[1] += part.y, d[2] += part.z, d[3] += part.w;
                }
            }
        }
    }

    DEVICE void write(int tile, const float (&sums)[RB][MT][4], const float* row_scale, const float* bias, void* out,
                      i64 out_stride, bool float_out) const {
        int g = lane >> 2, t = lane & 3, begin = token_begin(tile), count = token_count(tile);
#pragma unroll
        for (int rb = 0; rb < RB; ++rb) {
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
                int row = row_block(tile, rb) * BLOCK_ROWS + fragment_row(g, lower);
                if (row >= shape.rows) continue;
                float scale = row_scale != nullptr ? row_scale[row] : 1.0f;
                float offset = bias != nullptr ? bias[row] : 0.0f;
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        int token = (wm * MT + mt) * 8 + 2 * t + i;
                        if (token >= count) continue;
                        float value = sums[rb][mt][lower * 2 + i] * scale + offset;
                        i64 index = i64(begin + token) * out_stride + row;
                        if (float_out)
                            static_cast<float*>(out)[index] = value;
                        else
                            static_cast<u16*>(out)[index] = float_to_bf16(value);
                    }
                }
            }
        }
    }

    // Leaves this block's part of a tile, and adds all parts if it is the last to come. True if `sums` is the whole.
    DEVICE bool add_blocks(int tile, i64 begin, int k_begin, int k_end, float (&sums)[RB][MT][4], float4* partials,
                           u32* arrived) const {
        __shared__ bool is_last;
        constexpr int PLANE = WM * WR * RB * MT * 32;
        int place = (wm * WR + wr) * RB * MT * 32 + lane;
        i64 tile_begin = i64(tile) * shape.k_steps;
        if (wk == 0) {
            float4* mine = partials + (i64(blockIdx.x) * 2 + (begin > tile_begin ? 0 : 1)) * PLANE + place;
#pragma unroll
            for (int i = 0; i < RB * MT; ++i) {
                float(&d)[4] = sums[i / MT][i % MT];
                mine[i * 32] = make_float4(d[0], d[1], d[2], d[3]);
            }
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 before = atomicAdd(arrived + tile, u32(k_end - k_begin));
            is_last = before + u32(k_end - k_begin) == u32(shape.k_steps);
            if (is_last) arrived[tile] = 0;
        }
        __syncthreads();
        bool last = is_last;
        if (!last) return false;
        __threadfence();
        if (wk == 0) {
#pragma unroll
            for (int i = 0; i < RB * MT; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i / MT][i % MT][j] = 0.0f;
            int block = int(tile_begin * gridDim.x / (i64(shape.tiles) * shape.k_steps));
            while (block > 0 && shape.first_step(block) > tile_begin) --block;
            while (shape.first_step(block + 1) <= tile_begin) ++block;
            for (; block < int(gridDim.x); ++block) {
                i64 first = shape.first_step(block);
                if (first >= tile_begin + shape.k_steps) break;
                const float4* part = partials + (i64(block) * 2 + (first > tile_begin ? 0 : 1)) * PLANE + place;
#pragma unroll
                for (int i = 0; i < RB * MT; ++i) {
                    float4 value = load_through_l2(part + i * 32);
                    float(&d)[4] = sums[i / MT][i % MT];
                    d[0] += value.x, d[1] += value.y, d[2] += value.z, d[3] += value.w;
                }
            }
        }
        return true;
    }

    DEVICE void run(const float* row_scale, const float* bias, void* out, i64 out_stride, bool float_out, float4* partials,
                    u32* arrived) {
        float4* scratch = reinterpret_cast<float4*>(memory + STAGES * STAGE_BYTES);
        i64 begin = shape.first_step(blockIdx.x), end = shape.first_step(blockIdx.x + 1);
        int steps = int(end - begin);

        // The next step to load, and the next to multiply.
        int load_tile = int(begin / shape.k_steps), load_step = int(begin % shape.k_steps);
        int tile = load_tile, step = load_step, segment_begin = load_step;
        auto advance = [&](int& a_tile, int& a_step) {
            if (++a_step == shape.k_steps) a_step = 0, ++a_tile;
        };

        // Weights do not depend on the kernels before this one; activations do.
        let_next_kernel_start();
        int x_step = load_step, x_tile = load_tile;
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; ++stage) {
            if (stage < steps) {
                load_weights(stage, load_tile, load_step);
                advance(load_tile, load_step);
            }
            if (stage == 0) {
                wait_for_previous_kernel();
            }
            if (stage < steps) {
                load_activations(stage, x_tile, x_step);
                advance(x_tile, x_step);
            }
            commit_copies();
        }

        float sums[RB][MT][4] = {};
        int stage = 0;
        for (int index = 0; index < steps; ++index) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();
            int next = stage + STAGES - 1 >= STAGES ? stage - 1 : stage + STAGES - 1;
            if (index + STAGES - 1 < steps) {
                load_weights(next, load_tile, load_step);
                load_activations(next, load_tile, load_step);
                advance(load_tile, load_step);
            }
            commit_copies();
            multiply(stage, tile, step, sums);
            stage = stage + 1 == STAGES ? 0 : stage + 1;

            bool tile_done = step + 1 == shape.k_steps;
            if (tile_done || index + 1 == steps) {
                add_columns(scratch, sums);
                bool whole = segment_begin == 0 && tile_done;
                if (!whole) whole = add_blocks(tile, begin, segment_begin, step + 1, sums, partials, arrived);
                if (whole && wk == 0) write(tile, sums, row_scale, bias, out, out_stride, float_out);
#pragma unroll
                for (int i = 0; i < RB * MT; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums[i / MT][i % MT][j] = 0.0f;
                segment_begin = 0;
            }
            advance(tile, step);
        }
        wait_for_copies<0>();
    }
};

// `X_ROWS`: rows of activations that a stage has room for, the tokens of the largest tile.
template <class Format, int X_ROWS, int MT, int RB, int WR, int WK, int WM, int STAGES>
DEVICE void linear(const u8* weight, const float* row_scale, const float* bias, const u16* x, void* out, i64 out_stride,
                   int float_out, int tokens, int rows, int columns, int split, float4* partials, u32* arrived) {
    extern __shared__ __align__(128) u8 memory[];
    using Kernel = LinearKernel<Format, X_ROWS, MT, RB, WR, WK, WM, STAGES>;
    int units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS, warp = threadIdx.x >> 5;
    int row_tiles = ((rows + BLOCK_ROWS - 1) / BLOCK_ROWS + Kernel::TILE_BLOCKS - 1) / Kernel::TILE_BLOCKS;
    int token_tiles = (tokens + Kernel::TILE_TOKENS - 1) / Kernel::TILE_TOKENS;
    LinearShape shape{tokens, rows, columns, token_tiles, row_tiles * token_tiles, (units + WK - 1) / WK, split != 0};
    Kernel kernel{weight, x, shape, units, int(threadIdx.x & 31), warp / WK % WR, warp % WK, warp / (WK * WR), memory};
    kernel.run(row_scale, bias, out, out_stride, float_out != 0, partials, arrived);
}

#define LINEAR_KERNEL(NAME, FORMAT, X_ROWS, MT, RB, WR, WK, WM, STAGES)                                                       \
    extern "C" __global__ void __launch_bounds__(32 * WR * WK * WM)                                                           \
        NAME(const u8* weight, const float* row_scale, const float* bias, const u16* x, void* out, i64 out_stride,             \
             int float_out, int tokens, int rows, int columns, int split, float4* partials, u32* arrived) {                    \
        linear<FORMAT, X_ROWS, MT, RB, WR, WK, WM, STAGES>(weight, row_scale, bias, x, out, out_stride, float_out, tokens,     \
                                                           rows, columns, split, partials, arrived);                          \
    }
