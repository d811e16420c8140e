// Rotary embedding and the store of K and V into the paged cache.
#include "common.cuh"

enum KVType { KV_E4M3 = 0, KV_BF16 = 1, KV_F32 = 2 };

DEVICE void store_kv(void* cache, i64 index, float value, float scale, int type) {
    if (type == KV_E4M3)
        static_cast<u8*>(cache)[index] = float_to_e4m3(value / scale);
    else if (type == KV_BF16)
        static_cast<u16*>(cache)[index] = float_to_bf16(value);
    else
        static_cast<float*>(cache)[index] = value;
}

// Grid: (tokens, ceil((heads + 2 kv_heads) / 4)); block: 4 warps, each one head.
// qkv [T, (heads + 2 kv_heads) * head_dim]; the q part is rotated in place. A negative slot stores nothing.
extern "C" __global__ void rope_and_store_kv(u16* qkv, const int* positions, const i64* slot_mapping, void* key_cache,
                                             void* value_cache, const float* inv_freq, const float* q_norm,
                                             const float* k_norm, int heads, int kv_heads, int head_dim, float magnitude,
                                             float eps, float key_scale, float value_scale, int kv_type) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    int half = head_dim / 2, lane = threadIdx.x & 31, head = blockIdx.y * 4 + (threadIdx.x >> 5);
    if (head >= heads + 2 * kv_heads) return;
    u16* x = qkv + (i64(blockIdx.x) * (heads + 2 * kv_heads) + head) * head_dim;
    i64 slot = slot_mapping[blockIdx.x];
    if (head >= heads + kv_heads) {
        i64 base = (slot * kv_heads + (head - heads - kv_heads)) * head_dim;
        if (slot >= 0)
            for (int i = lane; i < head_dim; i += 32) store_kv(value_cache, base + i, bf16_to_float(x[i]), value_scale, kv_type);
        return;
    }
    bool is_query = head < heads;
    float position = float(positions[blockIdx.x]);
    const float* norm = is_query ? q_norm : k_norm;
    float inverse = 1.0f;
    if (norm != nullptr) {
        float sum = 0.0f;
        for (int i = lane; i < head_dim; i += 32) sum += bf16_to_float(x[i]) * bf16_to_float(x[i]);
        inverse = rsqrtf(warp_sum(sum) / float(head_dim) + eps);
    }
    i64 base = (slot * kv_heads + (head - heads)) * head_dim;
    for (int i = lane; i < half; i += 32) {
        float a = bf16_to_float(x[i]), b = bf16_to_float(x[i + half]), sine, cosine;
        sincosf(position * inv_freq[i], &sine, &cosine);
        sine *= magnitude, cosine *= magnitude;
        if (norm != nullptr) {
            a *= inverse * norm[i];
            b *= inverse * norm[i + half];
        }
        float low = a * cosine - b * sine, high = b * cosine + a * sine;
        if (is_query) {
            x[i] = float_to_bf16(low);
            x[i + half] = float_to_bf16(high);
        } else if (slot >= 0) {
            store_kv(key_cache, base + i, low, key_scale, kv_type);
            store_kv(key_cache, base + half + i, high, key_scale, kv_type);
        }
    }
}
