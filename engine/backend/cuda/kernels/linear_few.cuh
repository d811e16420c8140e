// out[T, N] = x[T, K] W[N, K]^T for 1 to 8 tokens, at the speed of reading W.
//
// All units of W form one sequence, row block by row block, which is dealt out evenly to warps. A warp streams its share
// through shared memory, several units ahead, and never waits for another: activations are so few that the L1 cache holds them.
// A row block that one warp reads whole is written by it. The parts of others are added at the end, in the order of their
// columns: within a block in shared memory, between blocks in `partials`, by the last to arrive.
//
// `split`: blocks may begin and end inside a row block; otherwise they are dealt whole ones.
#pragma once
#include "formats.cuh"

// All counts fit in 32 bits, products with the number of blocks included: divisions of 64 bits would cost a warp as much as
// several units.
struct Shares {
    u32 row_blocks, units;
    bool split;

    DEVICE u32 block_begin(u32 block) const {
        if (split) return row_blocks * units * block / gridDim.x;
        return row_blocks * block / gridDim.x * units;
    }
};

template <class Format, int STAGES>
struct FewTokensKernel {
    const float* row_scale;
    const float* bias;
    void* out;
    i64 out_stride;
    bool float_out;
    int tokens, rows, columns;
    Shares shares;
    int lane;

    DEVICE void write(u32 row_block, float4 sums) const {
        int g = lane >> 2, t = lane & 3;
        const float values[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            int row = row_block * BLOCK_ROWS + fragment_row(g, lower);
            if (row >= rows || 2 * t >= tokens) continue;
            float scale = row_scale != nullptr ? row_scale[row] : 1.0f;
            float offset = bias != nullptr ? bias[row] : 0.0f;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int token = 2 * t + i;
                if (token >= tokens) continue;
                float value = values[lower * 2 + i] * scale + offset;
                if (float_out)
                    static_cast<float*>(out)[token * out_stride + row] = value;
                else
                    static_cast<u16*>(out)[token * out_stride + row] = float_to_bf16(value);
            }
        }
    }

    // This block's part of a row block whose other parts are with other blocks.
    DEVICE void add_blocks(u32 row_block, u32 begin, u32 count, float4 sums, float4* partials, u32* arrived) const {
        u32 first_unit = row_block * shares.units;
        partials[(blockIdx.x * 2 + (begin > first_unit ? 0 : 1)) * 32 + lane] = sums;
        __threadfence();
        __syncwarp();
        u32 before = 0;
        if (lane == 0) before = atomicAdd(arrived + row_block, count);
        before = __shfl_sync(0xFFFFFFFFu, before, 0);
        if (before + count != shares.units) return;
        __threadfence();
        if (lane == 0) arrived[row_block] = 0;
        u32 block = blockIdx.x;  // is one of them: go back to the first
        while (block > 0 && shares.block_begin(block) > first_unit) --block;
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (; block < gridDim.x; ++block) {
            u32 block_begin = shares.block_begin(block);
            if (block_begin >= first_unit + shares.units) break;
            float4 part = load_through_l2(partials + (block * 2 + (block_begin > first_unit ? 0 : 1)) * 32 + lane);
            total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
        }
        write(row_block, total);
    }

    DEVICE void run(const u8* weight, const u16* x, float4* partials, u32* arrived) const {
        extern __shared__ __align__(128) u8 memory[];  // for each warp a ring of units; then two sums
        constexpr u32 RING_BYTES = STAGES * Format::UNIT_BYTES;
        u32 warp = threadIdx.x >> 5, log_warps = __ffs(blockDim.x) - 6, warps = 1u << log_warps, units = shares.units;
        float4* parts = reinterpret_cast<float4*>(memory + warps * RING_BYTES);  // [warp][2][lane]
        u32 block_begin = shares.block_begin(blockIdx.x), block_size = shares.block_begin(blockIdx.x + 1) - block_begin;
        auto warp_begin = [&](u32 w) { return block_begin + (block_size * w >> log_warps); };
        u32 begin = warp_begin(warp), end = warp_begin(warp + 1);
        u32 row_block = begin / units, unit = begin - row_block * units;

        // Weights do not depend on the kernels before this one; activations do.
        u32 next_block = row_block, next_left = units - unit, copies_left = end - begin;
        const u8* source = weight + unit_place(row_block, unit, units, shares.row_blocks) * Format::UNIT_BYTES;
        u32 stride = group_width(row_block, shares.row_blocks) * Format::UNIT_BYTES;
        u32 ring = shared_address(memory) + warp * RING_BYTES;
        auto copy_next = [&](u32 slot) {
            if (copies_left != 0) {
                Format::copy_unit(ring + slot, source, lane);
                --copies_left;
                source += stride;
                if (--next_left == 0) {
                    next_left = units, ++next_block;
                    source = weight + unit_place(next_block, 0, units, shares.row_blocks) * Format::UNIT_BYTES;
                    stride = group_width(next_block, shares.row_blocks) * Format::UNIT_BYTES;
                }
            }
            commit_copies();
        };
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; ++stage) copy_next(stage * Format::UNIT_BYTES);
        let_next_kernel_start();
        wait_for_previous_kernel();

        const u16* token = x + i64(min(lane >> 2, tokens - 1)) * columns + (lane & 3) * 16;
        u32 used = 0, filled = (STAGES - 1) * Format::UNIT_BYTES;
        u32 codes = ring + lane * 16, scales = ring + 1024 + lane * 4;
        u32 left = end - begin;
        bool first_segment = true;
        while (left != 0) {
            u32 count = min(units - unit, left);
            const u16* at = token + unit * UNIT_COLUMNS;
            float sums[2][4] = {};
#pragma unroll 1
            for (u32 last = unit + count; unit < last; ++unit, at += UNIT_COLUMNS) {
                u32 b[2][8];
                load_activations(b, at, unit);
                copy_next(filled);  // into the slot that was used in the last round
                wait_for_copies<STAGES - 1>();
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32 a[4][4];
                    Format::fragments(codes + used, scales + used, half, a);
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        mma_bf16(sums[half], a[j][0], a[j][1], a[j][2], a[j][3], b[half][2 * j], b[half][2 * j + 1]);
                }
                filled = used;
                used = used + Format::UNIT_BYTES == RING_BYTES ? 0 : used + Format::UNIT_BYTES;
            }
            float4 sum = make_float4(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1], sums[0][2] + sums[1][2],
                                     sums[0][3] + sums[1][3]);
            if (count == units)
                write(row_block, sum);
            else
                parts[(warp * 2 + (first_segment ? 0 : 1)) * 32 + lane] = sum;
            first_segment = false;
            left -= count;
            unit = 0, ++row_block;
        }
        __syncthreads();

        if (block_size == 0) return;
        u32 block_end = block_begin + block_size, last_block = (block_end - 1) / units;
        for (u32 shared_block = block_begin / units + warp; shared_block <= last_block; shared_block += warps) {
            u32 first = shared_block * units, low = max(first, block_begin), high = min(first + units, block_end);
            // The warp that holds `low`: the last that begins there or before.
            u32 w = min(((low - block_begin + 1) * warps - 1) / block_size, warps - 1);
            while (warp_begin(w) > low) --w;
            while (warp_begin(w + 1) <= low) ++w;
            if (warp_begin(w) <= first && warp_begin(w + 1) >= first + units) continue;  // it wrote the row block
            float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (; w < warps && warp_begin(w) < high; ++w) {
                if (warp_begin(w) == warp_begin(w + 1)) continue;
                float4 part = parts[(w * 2 + (warp_begin(w) >= first ? 0 : 1)) * 32 + lane];
                total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
            }
            if (high - low == units)
                write(shared_block, total);
            else
                add_blocks(shared_block, block_begin, high - low, total, partials, arrived);
        }
    }

    // A lane's share of a unit's activations, `at` its first. Columns past the end are zero: they meet zero weights, but must
    // not be NaN.
    DEVICE void load_activations(u32 (&b)[2][8], const u16* at, u32 unit) const {
        if (int(unit + 1) * UNIT_COLUMNS <= columns) {
#pragma unroll
            for (int i = 0; i < 4; ++i) load_four(b[i >> 1] + (i & 1) * 4, at + (i >> 1) * 64 + (i & 1) * 8);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32* four = b[i >> 1] + (i & 1) * 4;
                four[0] = four[1] = four[2] = four[3] = 0;
                int column = int(unit) * UNIT_COLUMNS + (lane & 3) * 16 + (i >> 1) * 64 + (i & 1) * 8;
                if (column < columns) load_four(four, at + (i >> 1) * 64 + (i & 1) * 8);
            }
        }
    }

    // Volatile, so that all are asked for before the first is used.
    static DEVICE void load_four(u32* words, const u16* source) {
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(source));
    }
};

// Blocks have 8 or 16 warps. Needs columns in multiples of 8: activations are read 16 bytes at a time.
#define LINEAR_FEW_KERNEL(NAME, FORMAT, STAGES)                                                                               \
    extern "C" __global__ void __launch_bounds__(512, 2)                                                                      \
        NAME(const u8* weight, const float* row_scale, const float* bias, const u16* x, void* out, i64 out_stride,             \
             int float_out, int tokens, int rows, int columns, int split, float4* partials, u32* arrived) {                    \
        Shares shares{u32(rows + BLOCK_ROWS - 1) / BLOCK_ROWS, u32(columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS, split != 0};    \
        FewTokensKernel<FORMAT, STAGES> kernel{row_scale, bias, out, out_stride, float_out != 0, tokens, rows, columns,        \
                                               shares, int(threadIdx.x & 31)};                                                \
        kernel.run(weight, x, partials, arrived);                                                                             \
    }
