// Attention for any head size and type of cache, one warp a query token and head: for shapes that the tensor-core kernels
// do not take, and to check them against.
#include "common.cuh"

constexpr int LANE_FEATURES = 16;  // head sizes up to 512

struct CacheReader {
    const void* data;
    int type;  // 0 E4M3, 1 bfloat16, 2 float32
    DEVICE float operator[](i64 index) const {
        if (type == 0) return e4m3_to_float(static_cast<const u8*>(data)[index]);
        if (type == 1) return bf16_to_float(static_cast<const u16*>(data)[index]);
        return static_cast<const float*>(data)[index];
    }
};

// Grid: (tokens, ceil(heads / 4)); block: 4 warps.
extern "C" __global__ void attention_any(const u16* qkv, const void* key_cache, const void* value_cache, const int* query_start,
                                         const int* seq_lens, const int* block_tables, int sequences, int heads, int kv_heads,
                                         int head_dim, int block_size, int max_blocks, int window, float score_scale,
                                         float out_scale, int kv_type, u16* out) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    int token = blockIdx.x, head = blockIdx.y * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (head >= heads) return;
    int low = 0, high = sequences;  // the sequence that owns the token
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (query_start[middle] <= token)
            low = middle;
        else
            high = middle;
    }
    int position = seq_lens[low] - (query_start[low + 1] - token);
    int begin = window > 0 ? max(position - window + 1, 0) : 0;
    int kv_head = head / (heads / kv_heads);
    const u16* q = qkv + (i64(token) * (heads + 2 * kv_heads) + head) * head_dim;
    CacheReader keys{key_cache, kv_type}, values{value_cache, kv_type};
    float query[LANE_FEATURES], result[LANE_FEATURES];
    for (int i = 0; i < LANE_FEATURES; ++i) {
        query[i] = i * 32 + lane < head_dim ? bf16_to_float(q[i * 32 + lane]) : 0.0f;
        result[i] = 0.0f;
    }
    float peak = MINUS_INFINITY, total = 0.0f;
    for (int at = begin; at <= position; ++at) {
        i64 slot = i64(block_tables[i64(low) * max_blocks + at / block_size]) * block_size + at % block_size;
        i64 base = (slot * kv_heads + kv_head) * head_dim;
        float score = 0.0f;
        for (int i = 0; i < LANE_FEATURES; ++i)
            if (i * 32 + lane < head_dim) score += query[i] * keys[base + i * 32 + lane];
        score = warp_sum(score) * score_scale;
        float highest = fmaxf(peak, score), shrink = exp2f(peak - highest), weight = exp2f(score - highest);
        peak = highest;
        total = total * shrink + weight;
        for (int i = 0; i < LANE_FEATURES; ++i)
            if (i * 32 + lane < head_dim) result[i] = result[i] * shrink + weight * values[base + i * 32 + lane];
    }
    u16* target = out + (i64(token) * heads + head) * head_dim;
    for (int i = 0; i < LANE_FEATURES; ++i)
        if (i * 32 + lane < head_dim) target[i * 32 + lane] = float_to_bf16(result[i] / total * out_scale);
}
