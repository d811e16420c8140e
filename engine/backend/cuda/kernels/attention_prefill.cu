// Attention of sequences with several query tokens over the paged cache (FlashAttention-2, Dao 2023).
//
// A block takes 128 rows: as many query tokens as fit with all heads of one group, so that the group shares each key and
// value, which are brought to 16 bits once, in shared memory. Tiles of the cache are 64 tokens.
#include "attention.cuh"

constexpr int WARPS = 8;
constexpr int ROWS = WARPS * 16;
constexpr int TILE = 64;

template <class Cache, int D>
struct PrefillTile {
    static constexpr int STRIDE = D + 8;                             // of a shared row, in 16-bit elements
    static constexpr int PIECES = TILE * D * Cache::BYTES / 16;      // of 16 bytes of a tile of keys
    static constexpr int THREAD_PIECES = PIECES / (WARPS * 32);
    static constexpr int ROW_PIECES = D * Cache::BYTES / 16;
    static_assert(PIECES % (WARPS * 32) == 0, "threads share a tile evenly");

    uint4 pieces[THREAD_PIECES];

    // Tokens outside of [begin, end) become zero.
    DEVICE void load(const u8* cache, const int* table, const AttentionShape& shape, int kv_head, int token, int begin, int end) {
#pragma unroll
        for (int i = 0; i < THREAD_PIECES; ++i) {
            int index = i * WARPS * 32 + threadIdx.x, position = token + index / ROW_PIECES;
            pieces[i] = make_uint4(0, 0, 0, 0);
            if (position < begin || position >= end) continue;
            i64 slot = i64(table[position / shape.block_size]) * shape.block_size + position % shape.block_size;
            pieces[i] = *reinterpret_cast<const uint4*>(cache + (slot * shape.kv_heads + kv_head) * D * Cache::BYTES +
                                                        index % ROW_PIECES * 16);
        }
    }

    DEVICE void store(u16* shared) const {
#pragma unroll
        for (int i = 0; i < THREAD_PIECES; ++i) {
            int index = i * WARPS * 32 + threadIdx.x;
            u32* target = reinterpret_cast<u32*>(shared + index / ROW_PIECES * STRIDE + index % ROW_PIECES * (16 / Cache::BYTES));
            const u32 words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
            constexpr int PAIRS = 8 / Cache::BYTES;
            u32 pairs[PAIRS];
#pragma unroll
            for (int j = 0; j < PAIRS / 2; ++j) Cache::four(words, j, pairs[2 * j], pairs[2 * j + 1]);
#pragma unroll
            for (int j = 0; j < PAIRS / 4; ++j)
                reinterpret_cast<uint4*>(target)[j] = make_uint4(pairs[4 * j], pairs[4 * j + 1], pairs[4 * j + 2], pairs[4 * j + 3]);
        }
    }
};

template <class Cache, int D>
DEVICE void prefill(const u16* qkv, const u8* key_cache, const u8* value_cache, const int* query_start, const int* seq_lens,
                    const int* block_tables, const AttentionShape& shape, u16* out) {
    extern __shared__ __align__(16) u16 shared[];  // keys, then values
    using Tile = PrefillTile<Cache, D>;
    let_next_kernel_start();
    wait_for_previous_kernel();
    int sequence = blockIdx.z, kv_head = blockIdx.y, group = shape.group();
    int first_token = query_start[sequence], query_length = query_start[sequence + 1] - first_token;
    int tile_tokens = ROWS / group;
    int tile_begin = (int(gridDim.x) - 1 - int(blockIdx.x)) * tile_tokens;  // the longest first
    if (query_length <= 1 || tile_begin >= query_length) return;
    int tile_end = min(tile_begin + tile_tokens, query_length);
    int length = seq_lens[sequence], history = length - query_length;
    int begin = shape.first_visible(history + tile_begin), end = history + tile_end;
    const int* table = block_tables + i64(sequence) * shape.max_blocks;
    u16 *keys = shared, *values = shared + TILE * Tile::STRIDE;

    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int token_stride = (shape.heads + 2 * shape.kv_heads) * D;
    int position[2];
    bool valid[2];
    i64 query_row[2], out_row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int row = warp * 16 + i * 8 + g, token = tile_begin + row / group, head = kv_head * group + row % group;
        valid[i] = row < tile_tokens * group && token < tile_end;
        position[i] = history + token;
        query_row[i] = i64(first_token + token) * token_stride + head * D;
        out_row[i] = (i64(first_token + token) * shape.heads + head) * D;
    }

    u32 query[D / 16][4];
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 pair = 0;
            if (valid[i & 1]) pair = *reinterpret_cast<const u32*>(qkv + query_row[i & 1] + j * 16 + (i >> 1) * 8 + 2 * t);
            query[j][i] = Cache::pack_query(pair);
        }
    }

    float result[D / 8][4] = {};
    float peak[2] = {MINUS_INFINITY, MINUS_INFINITY}, total[2] = {0.0f, 0.0f};
    Tile next_keys, next_values;
    int first_tile = begin / TILE * TILE;
    next_keys.load(key_cache, table, shape, kv_head, first_tile, begin, end);
    next_values.load(value_cache, table, shape, kv_head, first_tile, begin, end);
    for (int token = first_tile; token < end; token += TILE) {
        __syncthreads();
        next_keys.store(keys);
        next_values.store(values);
        __syncthreads();
        if (token + TILE < end) {
            next_keys.load(key_cache, table, shape, kv_head, token + TILE, begin, end);
            next_values.load(value_cache, table, shape, kv_head, token + TILE, begin, end);
        }

        float s[TILE / 8][4] = {};
#pragma unroll
        for (int j = 0; j < D / 16; ++j) {
#pragma unroll
            for (int n = 0; n < TILE / 16; ++n) {
                u32 b[4];
                load_matrices(b, shared_address(keys + (n * 16 + (lane >> 4) * 8 + (lane & 7)) * Tile::STRIDE + j * 16 +
                                                ((lane >> 3) & 1) * 8));
                Cache::mma(s[2 * n], query[j][0], query[j][1], query[j][2], query[j][3], b[0], b[1]);
                Cache::mma(s[2 * n + 1], query[j][0], query[j][1], query[j][2], query[j][3], b[2], b[3]);
            }
        }

        bool masked = token + TILE - 1 > history + tile_begin || shape.window > 0;
        float highest[2] = {peak[0], peak[1]};
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float score = s[n][i] * shape.score_scale;
                if (masked) {
                    int at = token + n * 8 + 2 * t + (i & 1), query_at = position[i >> 1];
                    if (at > query_at || at < shape.first_visible(query_at)) score = MINUS_INFINITY;
                }
                s[n][i] = score;
                highest[i >> 1] = fmaxf(highest[i >> 1], score);
            }
        }
        float shrink[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xFFFFFFFFu, highest[i], 1));
            highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xFFFFFFFFu, highest[i], 2));
            shrink[i] = highest[i] == peak[i] ? 1.0f : exp2f(peak[i] - highest[i]);
            peak[i] = highest[i];
            total[i] *= shrink[i];
        }
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[n][i] = s[n][i] == MINUS_INFINITY ? 0.0f : exp2f(s[n][i] - peak[i >> 1]);
                total[i >> 1] += s[n][i];
            }
        }
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
            result[n][0] *= shrink[0], result[n][1] *= shrink[0], result[n][2] *= shrink[1], result[n][3] *= shrink[1];
        }
#pragma unroll
        for (int j = 0; j < TILE / 16; ++j) {
            u32 a0 = Cache::pack(s[2 * j][0], s[2 * j][1]), a1 = Cache::pack(s[2 * j][2], s[2 * j][3]);
            u32 a2 = Cache::pack(s[2 * j + 1][0], s[2 * j + 1][1]), a3 = Cache::pack(s[2 * j + 1][2], s[2 * j + 1][3]);
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                u32 b[4];
                load_matrices_transposed(b, shared_address(values + (j * 16 + ((lane >> 3) & 1) * 8 + (lane & 7)) * Tile::STRIDE +
                                                           n * 16 + (lane >> 4) * 8));
                Cache::mma(result[2 * n], a0, a1, a2, a3, b[0], b[1]);
                Cache::mma(result[2 * n + 1], a0, a1, a2, a3, b[2], b[3]);
            }
        }
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
        total[i] += __shfl_xor_sync(0xFFFFFFFFu, total[i], 1);
        total[i] += __shfl_xor_sync(0xFFFFFFFFu, total[i], 2);
        if (!valid[i]) continue;
        float factor = shape.out_scale / total[i];
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
            *reinterpret_cast<u32*>(out + out_row[i] + n * 8 + 2 * t) = pack_bf16(result[n][2 * i] * factor, result[n][2 * i + 1] * factor);
    }
}

// Grid: (query tiles of the longest sequence, kv_heads, sequences); block: 256 threads; dynamic shared memory:
// 2 * 64 * (D + 8) 16-bit elements.
#define PREFILL_KERNEL(NAME, CACHE, D)                                                                                        \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                                  \
        NAME(const u16* qkv, const u8* key_cache, const u8* value_cache, const int* query_start, const int* seq_lens,         \
             const int* block_tables, int heads, int kv_heads, int block_size, int max_blocks, int window, float score_scale, \
             float out_scale, u16* out) {                                                                                     \
        AttentionShape shape{heads, kv_heads, block_size, max_blocks, window, score_scale * CACHE::SCALE,                      \
                             out_scale * CACHE::SCALE};                                                                       \
        prefill<CACHE, D>(qkv, key_cache, value_cache, query_start, seq_lens, block_tables, shape, out);                      \
    }

PREFILL_KERNEL(attention_prefill_fp8_64, Fp8Cache, 64)
PREFILL_KERNEL(attention_prefill_fp8_128, Fp8Cache, 128)
PREFILL_KERNEL(attention_prefill_fp8_256, Fp8Cache, 256)
PREFILL_KERNEL(attention_prefill_bf16_64, Bf16Cache, 64)
PREFILL_KERNEL(attention_prefill_bf16_128, Bf16Cache, 128)
PREFILL_KERNEL(attention_prefill_bf16_256, Bf16Cache, 256)
