// out[T, N] = x[T, K] W[N, K]^T on Hopper for more than a few tokens, by warpgroup products.
//
// One thread copies (bulk copies that complete on barriers in shared memory), GROUPS warpgroups multiply. A step is one unit of
// 128 columns: a warp decodes its row block's unit into A fragments while the products of the half unit before are under
// way. Activations come from a copy that tile_activations arranged: columns in the order of the fragments, eight tokens by
// 64 columns in the swizzled form that the products read. A warpgroup takes SETS times 64 rows of a tile, by turns.
//
// Tiles are dealt out as in linear.cuh.
#pragma once
#include "formats.cuh"
#include "wgmma.cuh"

constexpr int TILE_COLUMNS = 64;
constexpr int ATOM_TOKENS = 8;
constexpr int ATOM_BYTES = ATOM_TOKENS * TILE_COLUMNS * 2;

// -- barriers in shared memory ---------------------------------------------------------------------------------------

DEVICE void init_barrier(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

DEVICE void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

DEVICE void arrive_and_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void wait_for_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

DEVICE void copy_bulk(u32 shared, const void* global, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier) : "memory");
}

// -- the product -----------------------------------------------------------------------------------------------------

struct HopperShape {
    int tokens, rows, columns;
    u32 units, row_blocks, atoms, token_tiles, tiles;
    bool split;

    // All fit in 32 bits, products with the number of blocks included.
    DEVICE u32 first_step(u32 block) const {
        if (split) return tiles * units * block / gridDim.x;
        return tiles * block / gridDim.x * units;
    }
};

template <class Format, int TOKENS, int GROUPS, int SETS, int STAGES>
struct HopperKernel {
    static constexpr int CONSUMERS = GROUPS * 4;  // warps
    static constexpr int ROW_BLOCKS = CONSUMERS * SETS;
    static constexpr int WEIGHT_BYTES = ROW_BLOCKS * Format::UNIT_BYTES;
    static constexpr int X_BYTES = TOKENS * UNIT_COLUMNS * 2;
    static constexpr int FRAGMENTS = TOKENS / 8;

    const u8* weight;
    const u8* x;
    HopperShape shape;
    u8* memory;    // stages of activations, then of weights
    u32 barriers;  // full, then empty

    DEVICE u32 x_stage(int stage) const { return shared_address(memory) + stage * X_BYTES; }
    DEVICE u8* weight_stage(int stage) const { return memory + STAGES * X_BYTES + stage * WEIGHT_BYTES; }
    DEVICE u32 full(int stage) const { return barriers + stage * 8; }
    DEVICE u32 empty(int stage) const { return barriers + (STAGES + stage) * 8; }

    using Sums = float[SETS][TOKENS / 2];

    // One thread copies. Weights do not depend on the kernels before this one, so they are asked for first.
    DEVICE void produce(u32 begin, u32 end) const {
        u32 first_tile = begin / shape.units, first_unit = begin - first_tile * shape.units;
        u32 tile = first_tile, unit = first_unit;
        for (u32 step = begin; step < end && step - begin < STAGES; ++step) {
            copy_weights(step - begin, tile, unit);
            if (++unit == shape.units) unit = 0, ++tile;
        }
        wait_for_previous_kernel();
        tile = first_tile, unit = first_unit;
        int stage = 0, round = 0;
        for (u32 step = begin; step < end; ++step) {
            if (step - begin >= STAGES) {
                wait_for_barrier(empty(stage), u32(round + 1) & 1);
                copy_weights(stage, tile, unit);
            }
            i64 atom = (i64(unit) * shape.atoms + tile % shape.token_tiles * (TOKENS / ATOM_TOKENS)) * 2;
            copy_bulk(x_stage(stage), x + atom * ATOM_BYTES, X_BYTES, full(stage));
            if (++stage == STAGES) stage = 0, ++round;
            if (++unit == shape.units) unit = 0, ++tile;
        }
    }

    DEVICE void copy_weights(int stage, u32 tile, u32 unit) const {
        int first = tile / shape.token_tiles * ROW_BLOCKS, count = min(int(shape.row_blocks) - first, ROW_BLOCKS);
        arrive_and_expect(full(stage), u32(count * Format::UNIT_BYTES + X_BYTES));
        for (int i = 0; i < count; i += GROUP_BLOCKS)
            copy_bulk(shared_address(weight_stage(stage)) + i * Format::UNIT_BYTES,
                      weight + unit_place(first + i, unit, shape.units, shape.row_blocks) * Format::UNIT_BYTES,
                      min(count - i, GROUP_BLOCKS) * Format::UNIT_BYTES, full(stage));
    }

    DEVICE void consume(u32 begin, u32 end, const float* row_scale, const float* bias, void* out, i64 out_stride,
                        bool float_out, float4* partials, u32* arrived) const {
        int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        u32 tile = begin / shape.units, unit = begin - tile * shape.units;
        wait_for_previous_kernel();
        int stage = 0;
        u32 parity = 0;
        // A segment is what this block does of a tile. Within one, only products touch the sums.
        for (u32 step = begin; step < end; ++tile, unit = 0) {
            u32 count = min(shape.units - unit, end - step);
            Sums sums;
            clear(sums);
            int last_stage = -1;
#pragma unroll 1
            for (u32 i = 0; i < count; ++i) {
                wait_for_barrier(full(stage), parity);
                u32 a[2][4][4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u64 b = tile_descriptor(x_stage(stage) + half * ATOM_BYTES, 2 * ATOM_BYTES);
#pragma unroll
                    for (int set = 0; set < SETS; ++set) {
                        u32(&fragments)[4][4] = a[(half * SETS + set) & 1];
                        Format::fragments(weight_stage(stage) + (set * CONSUMERS + warp) * Format::UNIT_BYTES, half, lane, fragments);
                        pin(sums[set]);
                        begin_products();
#pragma unroll
                        for (int j = 0; j < 4; ++j) multiply_products<TOKENS>(sums[set], fragments[j], b + j * 2);  // 32 bytes
                        commit_products();
                        // All but these are done: the other fragments, and the last stage, may be overwritten.
                        wait_for_products<1>();
                        if (half == 0 && set == 0 && last_stage >= 0 && lane == 0) arrive(empty(last_stage));
                    }
                }
                last_stage = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            wait_for_products<0>();
#pragma unroll
            for (int set = 0; set < SETS; ++set) pin(sums[set]);
            if (lane == 0) arrive(empty(last_stage));
            step += count;
            bool whole = count == shape.units;
            if (!whole) whole = add_blocks(tile, begin, count, sums, partials, arrived);
            if (!whole) continue;
#pragma unroll
            for (int set = 0; set < SETS; ++set) write(tile, set, sums[set], row_scale, bias, out, out_stride, float_out);
        }
    }

    static DEVICE void clear(Sums& sums) {
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) sums[set][i] = 0.0f;
    }

    DEVICE void write(u32 tile, int set, const float (&sums)[TOKENS / 2], const float* row_scale, const float* bias, void* out,
                      i64 out_stride, bool float_out) const {
        int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        int block = tile / shape.token_tiles * ROW_BLOCKS + set * CONSUMERS + warp, first_token = tile % shape.token_tiles * TOKENS;
        if (block >= int(shape.row_blocks)) return;
        float scale[2], offset[2];
        int row[2];
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            row[lower] = block * BLOCK_ROWS + fragment_row(g, lower);
            bool inside = row[lower] < shape.rows;
            scale[lower] = inside && row_scale != nullptr ? row_scale[row[lower]] : 1.0f;
            offset[lower] = inside && bias != nullptr ? bias[row[lower]] : 0.0f;
        }
        // Four neighbouring rows a lane after the transposition: 8 bytes, if all are there and aligned.
        int first_row = block * BLOCK_ROWS + 4 * t;
        bool together = (out_stride & 3) == 0 && (reinterpret_cast<u64>(out) & 7) == 0 && first_row + 4 <= shape.rows;
#pragma unroll
        for (int i = 0; i < FRAGMENTS; ++i) {
            if (first_token + i * 8 >= shape.tokens) break;
            float values[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) values[j] = sums[i * 4 + j] * scale[j >> 1] + offset[j >> 1];
            if (float_out) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    int token = first_token + i * 8 + 2 * t + (j & 1);
                    if (token < shape.tokens && row[j >> 1] < shape.rows)
                        static_cast<float*>(out)[token * out_stride + row[j >> 1]] = values[j];
                }
                continue;
            }
            u32 upper = transpose_8x8_b16(pack_bf16(values[0], values[1]));
            u32 lower = transpose_8x8_b16(pack_bf16(values[2], values[3]));
            int token = first_token + i * 8 + g;
            if (token >= shape.tokens) continue;
            u16* target = static_cast<u16*>(out) + token * out_stride + first_row;
            if (together) {
                *reinterpret_cast<uint2*>(target) = make_uint2(upper, lower);
            } else {
                const u16 four[4] = {u16(upper), u16(upper >> 16), u16(lower), u16(lower >> 16)};
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (first_row + j < shape.rows) target[j] = four[j];
            }
        }
    }

    DEVICE void synchronize_consumers() const { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * 32) : "memory"); }

    // As in linear.cuh. True if `sums` is the whole.
    DEVICE bool add_blocks(u32 tile, u32 begin, u32 count, Sums& sums, float4* partials, u32* arrived) const {
        __shared__ bool is_last;
        constexpr int PLANE = CONSUMERS * SETS * FRAGMENTS * 32;
        int place = (threadIdx.x >> 5) * SETS * FRAGMENTS * 32 + (threadIdx.x & 31);
        u32 tile_begin = tile * shape.units;
        float4* mine = partials + (i64(blockIdx.x) * 2 + (begin > tile_begin ? 0 : 1)) * PLANE + place;
#pragma unroll
        for (int i = 0; i < SETS * FRAGMENTS; ++i) {
            const float* d = sums[i / FRAGMENTS] + i % FRAGMENTS * 4;
            mine[i * 32] = make_float4(d[0], d[1], d[2], d[3]);
        }
        __threadfence();
        synchronize_consumers();
        if (threadIdx.x == 0) {
            u32 before = atomicAdd(arrived + tile, count);
            is_last = before + count == shape.units;
            if (is_last) arrived[tile] = 0;
        }
        synchronize_consumers();
        if (!is_last) return false;
        __threadfence();
        clear(sums);
        u32 block = blockIdx.x;  // is one of them: go back to the first
        while (block > 0 && shape.first_step(block) > tile_begin) --block;
        for (; block < gridDim.x; ++block) {
            u32 first = shape.first_step(block);
            if (first >= tile_begin + shape.units) break;
            const float4* part = partials + (i64(block) * 2 + (first > tile_begin ? 0 : 1)) * PLANE + place;
#pragma unroll
            for (int i = 0; i < SETS * FRAGMENTS; ++i) {
                float4 value = load_through_l2(part + i * 32);
                float* d = sums[i / FRAGMENTS] + i % FRAGMENTS * 4;
                d[0] += value.x, d[1] += value.y, d[2] += value.z, d[3] += value.w;
            }
        }
        return true;
    }
};

// `x` is what tile_activations made of the activations; `atoms`: groups of 8 tokens in it.
template <class Format, int TOKENS, int GROUPS, int SETS, int STAGES, int BLOCKS>
DEVICE void linear_hopper(const u8* weight, const float* row_scale, const float* bias, const u8* x, void* out, i64 out_stride,
                          int float_out, int tokens, int rows, int columns, int split, float4* partials, u32* arrived) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    using Kernel = HopperKernel<Format, TOKENS, GROUPS, SETS, STAGES>;
    u32 units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS, row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    u32 token_tiles = (tokens + TOKENS - 1) / TOKENS;
    u32 row_tiles = (row_blocks + Kernel::ROW_BLOCKS - 1) / Kernel::ROW_BLOCKS;
    HopperShape shape{tokens, rows, columns, units, row_blocks, u32(tokens + ATOM_TOKENS - 1) / ATOM_TOKENS, token_tiles,
                      row_tiles * token_tiles, split != 0};
    Kernel kernel{weight, x, shape, memory, shared_address(barriers)};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(kernel.full(stage), 1);
            init_barrier(kernel.empty(stage), Kernel::CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    let_next_kernel_start();
    u32 begin = shape.first_step(blockIdx.x), end = shape.first_step(blockIdx.x + 1);
    // The same in all lanes, as the compiler must know to let products run side by side.
    int warp = __shfl_sync(0xFFFFFFFFu, int(threadIdx.x >> 5), 0);
    // Registers of the copying warpgroup go to those that multiply.
    constexpr int EVEN = 65536 / BLOCKS / (GROUPS * 128 + 128) / 8 * 8, LEAST = 24;
    constexpr int MOST = ((GROUPS + 1) * EVEN - LEAST) / GROUPS / 8 * 8;
    if (warp >= Kernel::CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LEAST));
        if (threadIdx.x == Kernel::CONSUMERS * 32) kernel.produce(begin, end);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MOST < 240 ? MOST : 240));
        kernel.consume(begin, end, row_scale, bias, out, out_stride, float_out != 0, partials, arrived);
    }
}

#define LINEAR_HOPPER_KERNEL(NAME, FORMAT, TOKENS, GROUPS, SETS, STAGES, BLOCKS)                                              \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 128, BLOCKS)                                                  \
        NAME(const u8* weight, const float* row_scale, const float* bias, const u8* x, void* out, i64 out_stride,              \
             int float_out, int tokens, int rows, int columns, int split, float4* partials, u32* arrived) {                    \
        linear_hopper<FORMAT, TOKENS, GROUPS, SETS, STAGES, BLOCKS>(weight, row_scale, bias, x, out, out_stride, float_out,    \
                                                                    tokens, rows, columns, split, partials, arrived);         \
    }
