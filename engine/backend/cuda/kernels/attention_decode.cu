// Attention of sequences with one query token over the paged cache, split along the sequence (flash decoding).
//
// A warp computes S^T = K Q^T and O^T = V^T P^T, with the tokens of the cache (then the features of a head) as the 16 rows
// of a product and up to 8 heads of a group as its 8 columns. Both operands are read from memory as fragments, the
// features in an order of their own; P^T needs one movmatrix. There is no shared memory but for the last reduction.
#include "attention.cuh"

constexpr int WARPS = 4;
constexpr int COLUMNS = 8;  // heads of a group computed together

template <class Cache, int D>
struct DecodeWarp {
    static constexpr int TOKEN_TILES = D * Cache::BYTES <= 128 ? 2 : 1;  // of 16 tokens an iteration
    static constexpr int PIECES = D * Cache::BYTES / 64;                 // of 16 bytes a lane reads of a key
    static constexpr int STEPS = D / 16;                                 // mma steps along the features
    static constexpr int KEY_WORDS = D * Cache::BYTES / 16;              // a lane's share of a key: D/4 features
    static constexpr int VALUE_WORDS = D * Cache::BYTES / 32;            // of a value: D/8 features
    static constexpr int FEATURES = 16 / Cache::BYTES;                   // features of a piece
    static_assert(D % 64 == 0, "a key is read in pieces of 64 bytes by four lanes");

    u32 query[STEPS][2];
    u32 keys[TOKEN_TILES][2][KEY_WORDS];
    u32 values[TOKEN_TILES][4][VALUE_WORDS];
    float out[D / 16][4];
    float peak[2], total[2];
    int g, t;

    // Feature where step j's four begin for a lane: pieces are interleaved over the lanes.
    DEVICE int feature(int step) const {
        constexpr int STEPS_A_PIECE = FEATURES / 4;
        return (step / STEPS_A_PIECE) * 4 * FEATURES + t * FEATURES + (step % STEPS_A_PIECE) * 4;
    }

    DEVICE void load_query(const u16* q, int head_count) {
#pragma unroll
        for (int j = 0; j < STEPS; ++j) {
            uint2 four = make_uint2(0, 0);
            if (g < head_count) four = *reinterpret_cast<const uint2*>(q + g * D + feature(j));
            query[j][0] = Cache::pack_query(four.x);
            query[j][1] = Cache::pack_query(four.y);
        }
    }

    template <class Locate>
    DEVICE void load_keys(const u8* cache, int token, const Locate& locate) {
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
            auto place = locate(token + tile * 16);
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
                const u8* key = cache + place(lower * 8 + g) * Cache::BYTES;
#pragma unroll
                for (int piece = 0; piece < PIECES; ++piece)
                    load_words<4>(&keys[tile][lower][piece * 4], key + piece * 64 + t * 16);
            }
        }
    }

    template <class Locate>
    DEVICE void load_values(const u8* cache, int token, const Locate& locate) {
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
            auto place = locate(token + tile * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int offset = 2 * t + (i & 1) + (i >> 1) * 8;
                load_words<VALUE_WORDS>(values[tile][i], cache + place(offset) * Cache::BYTES + g * VALUE_WORDS * 4);
            }
        }
    }

    DEVICE void scores(float (&s)[TOKEN_TILES][4]) const {
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[tile][i] = 0.0f;
#pragma unroll
            for (int j = 0; j < STEPS; ++j) {
                u32 a0, a1, a2, a3;
                Cache::four(keys[tile][0], j, a0, a2);
                Cache::four(keys[tile][1], j, a1, a3);
                Cache::mma(s[tile], a0, a1, a2, a3, query[j][0], query[j][1]);
            }
        }
    }

    // Online softmax (Milakov & Gimelshein 2018) in base 2, then O^T += V^T P^T.
    DEVICE void accumulate(float (&s)[TOKEN_TILES][4], int token, int begin, int end, float scale) {
        float highest[2] = {peak[0], peak[1]};
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int position = token + tile * 16 + (i >> 1) * 8 + g;
                s[tile][i] = position >= begin && position < end ? s[tile][i] * scale : MINUS_INFINITY;
                highest[i & 1] = fmaxf(highest[i & 1], s[tile][i]);
            }
        }
#pragma unroll
        for (int offset = 4; offset < 32; offset <<= 1) {
            highest[0] = fmaxf(highest[0], __shfl_xor_sync(0xFFFFFFFFu, highest[0], offset));
            highest[1] = fmaxf(highest[1], __shfl_xor_sync(0xFFFFFFFFu, highest[1], offset));
        }
        if (__any_sync(0xFFFFFFFFu, highest[0] > peak[0] || highest[1] > peak[1])) {
            float shrink[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                shrink[i] = peak[i] == highest[i] ? 1.0f : exp2f(peak[i] - highest[i]);
                peak[i] = highest[i];
                total[i] *= shrink[i];
            }
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                out[i][0] *= shrink[0], out[i][1] *= shrink[1], out[i][2] *= shrink[0], out[i][3] *= shrink[1];
            }
        }
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                p[i] = s[tile][i] == MINUS_INFINITY ? 0.0f : exp2f(s[tile][i] - peak[i & 1]);
                total[i & 1] += p[i];
            }
            u32 b0 = transpose_8x8_b16(Cache::pack(p[0], p[1])), b1 = transpose_8x8_b16(Cache::pack(p[2], p[3]));
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                u32 a0, a1, a2, a3;
                Cache::zip(values[tile][0], values[tile][1], i, a0, a1);
                Cache::zip(values[tile][2], values[tile][3], i, a2, a3);
                Cache::mma(out[i], a0, a1, a2, a3, b0, b1);
            }
        }
    }
};

// Where one head's elements of 16 tokens lie, all in one block of the cache. Tokens outside of [begin, end) are masked, yet
// a weight of zero times an unwritten NaN would be NaN: a visible token is read in their place.
struct TokenTile {
    i64 base;
    int stride, lowest, highest;
    DEVICE i64 operator()(int offset) const { return base + i64(min(max(offset, lowest), highest)) * stride; }
};

struct Locator {
    const int* table;
    int block_size, begin, end, stride, head_offset;
    DEVICE TokenTile operator()(int token) const {
        token = min(max(token, begin & ~15), (end - 1) & ~15);
        i64 slot = i64(table[token / block_size]) * block_size + token % block_size;
        return TokenTile{slot * stride + head_offset, stride, begin - token, end - 1 - token};
    }
};

template <class Cache, int D>
DEVICE void decode(const u16* qkv, const u8* key_cache, const u8* value_cache, const int* query_start, const int* seq_lens,
                   const int* block_tables, const AttentionShape& shape, u16* out, float* partial_out, float2* partial_state,
                   int partial_rows) {
    __shared__ float warp_out[WARPS][COLUMNS][D + 1];
    __shared__ float2 warp_state[WARPS][COLUMNS];
    let_next_kernel_start();
    wait_for_previous_kernel();
    int sequence = blockIdx.z, token_index = query_start[sequence], next_index = query_start[sequence + 1];
    int length = seq_lens[sequence];  // before the branch: the three are read together
    if (next_index - token_index != 1) return;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int chunks = (shape.group() + COLUMNS - 1) / COLUMNS;
    int kv_head = blockIdx.y / chunks, first_head = kv_head * shape.group() + blockIdx.y % chunks * COLUMNS;
    int head_count = min((kv_head + 1) * shape.group() - first_head, COLUMNS);
    int begin = shape.first_visible(length - 1);

    using Warp = DecodeWarp<Cache, D>;
    constexpr int TILE = 16 * Warp::TOKEN_TILES;
    int first_tile = begin / TILE, tiles = (length + TILE - 1) / TILE - first_tile;
    int tile_begin = first_tile + tiles * int(blockIdx.x) / int(gridDim.x);
    int tile_end = first_tile + tiles * (int(blockIdx.x) + 1) / int(gridDim.x);

    Warp state;
    state.g = lane >> 2, state.t = lane & 3;
    i64 row = i64(token_index) * (shape.heads + 2 * shape.kv_heads) * D;
    state.load_query(qkv + row + i64(first_head) * D, head_count);
    state.peak[0] = state.peak[1] = MINUS_INFINITY;
    state.total[0] = state.total[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) state.out[i][j] = 0.0f;

    Locator locate{block_tables + i64(sequence) * shape.max_blocks, shape.block_size, begin, length, shape.kv_heads * D, kv_head * D};
    int tile = tile_begin + warp;
    if (tile < tile_end) {
        state.load_keys(key_cache, tile * TILE, locate);
        state.load_values(value_cache, tile * TILE, locate);
    }
    // The next tile's keys are asked for as soon as this one's are used, its values likewise.
    for (; tile < tile_end; tile += WARPS) {
        float s[Warp::TOKEN_TILES][4];
        int next = tile + WARPS < tile_end ? tile + WARPS : tile;
        state.scores(s);
        state.load_keys(key_cache, next * TILE, locate);
        state.accumulate(s, tile * TILE, begin, length, shape.score_scale);
        state.load_values(value_cache, next * TILE, locate);
    }

#pragma unroll
    for (int offset = 4; offset < 32; offset <<= 1) {
        state.total[0] += __shfl_xor_sync(0xFFFFFFFFu, state.total[0], offset);
        state.total[1] += __shfl_xor_sync(0xFFFFFFFFu, state.total[1], offset);
    }
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            warp_out[warp][2 * state.t + (j & 1)][state.g * (D / 8) + 2 * i + (j >> 1)] = state.out[i][j];
    if (state.g == 0) {
        warp_state[warp][2 * state.t] = make_float2(state.peak[0], state.total[0]);
        warp_state[warp][2 * state.t + 1] = make_float2(state.peak[1], state.total[1]);
    }
    __syncthreads();

    for (int i = threadIdx.x; i < head_count * D; i += WARPS * 32) {
        int column = i / D, d = i % D;
        float peak = MINUS_INFINITY, total = 0.0f, value = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) peak = fmaxf(peak, warp_state[w][column].x);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            float weight = warp_state[w][column].x == MINUS_INFINITY ? 0.0f : exp2f(warp_state[w][column].x - peak);
            total += weight * warp_state[w][column].y;
            value += weight * warp_out[w][column][d];
        }
        if (gridDim.x == 1) {
            out[(i64(token_index) * shape.heads + first_head + column) * D + d] = float_to_bf16(value / total * shape.out_scale);
        } else {
            // [split][sequence, head][D]
            i64 place = i64(blockIdx.x) * partial_rows + i64(sequence) * shape.heads + first_head + column;
            partial_out[place * D + d] = value;
            if (d == 0) partial_state[place] = make_float2(peak, total);
        }
    }
}

// Adds the splits of a sequence. Grid: (heads, sequences); block: D threads.
extern "C" __global__ void attention_combine(const int* query_start, const float* partial_out, const float2* partial_state,
                                             int partial_rows, int splits, int heads, float out_scale, u16* out) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    int sequence = blockIdx.y, token_index = query_start[sequence];
    if (query_start[sequence + 1] - token_index != 1) return;
    i64 row = i64(sequence) * heads + blockIdx.x;
    float peak = MINUS_INFINITY, total = 0.0f, value = 0.0f;
    for (int split = 0; split < splits; ++split) peak = fmaxf(peak, partial_state[i64(split) * partial_rows + row].x);
    for (int split = 0; split < splits; ++split) {
        float2 state = partial_state[i64(split) * partial_rows + row];
        if (state.x == MINUS_INFINITY) continue;
        float weight = exp2f(state.x - peak);
        total += weight * state.y;
        value += weight * partial_out[(i64(split) * partial_rows + row) * blockDim.x + threadIdx.x];
    }
    out[(i64(token_index) * heads + blockIdx.x) * blockDim.x + threadIdx.x] = float_to_bf16(value / total * out_scale);
}

// Grid: (splits, kv_heads * ceil(group / 8), sequences); block: 128 threads.
#define DECODE_KERNEL(NAME, CACHE, D)                                                                                         \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                                  \
        NAME(const u16* qkv, const u8* key_cache, const u8* value_cache, const int* query_start, const int* seq_lens,         \
             const int* block_tables, int heads, int kv_heads, int block_size, int max_blocks, int window, float score_scale, \
             float out_scale, u16* out, float* partial_out, float2* partial_state, int partial_rows) {                        \
        AttentionShape shape{heads, kv_heads, block_size, max_blocks, window, score_scale * CACHE::SCALE,                      \
                             out_scale * CACHE::SCALE};                                                                       \
        decode<CACHE, D>(qkv, key_cache, value_cache, query_start, seq_lens, block_tables, shape, out, partial_out,           \
                         partial_state, partial_rows);                                                                        \
    }

DECODE_KERNEL(attention_decode_fp8_64, Fp8Cache, 64)
DECODE_KERNEL(attention_decode_fp8_128, Fp8Cache, 128)
DECODE_KERNEL(attention_decode_fp8_256, Fp8Cache, 256)
DECODE_KERNEL(attention_decode_bf16_64, Bf16Cache, 64)
DECODE_KERNEL(attention_decode_bf16_128, Bf16Cache, 128)
DECODE_KERNEL(attention_decode_bf16_256, Bf16Cache, 256)
