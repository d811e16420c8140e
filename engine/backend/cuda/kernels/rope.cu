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

// Grid: tokens. Block: whole warps, each taking heads in turn; dynamic shared memory: head_dim floats.
// qkv [T, (heads + 2 kv_heads) * head_dim]; the q part is rotated in place. A negative slot stores nothing.
extern "C" __global__ void rope_and_store_kv(u16* qkv, const int* positions, const i64* slot_mapping, void* key_cache,
                                             void* value_cache, const float* inv_freq, const float* q_norm,
                                             const float* k_norm, int heads, int kv_heads, int head_dim, float magnitude,
                                             float eps, float key_scale, float value_scale, int kv_type) {
    extern __shared__ float angles[];  // cosines, then sines
    let_next_kernel_start();
    wait_for_previous_kernel();
    int half = head_dim / 2, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    float position = float(positions[blockIdx.x]);
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float sine, cosine;
        sincosf(position * inv_freq[i], &sine, &cosine);
        angles[i] = cosine * magnitude;
        angles[half + i] = sine * magnitude;
    }
    __syncthreads();

    u16* token = qkv + i64(blockIdx.x) * (heads + 2 * kv_heads) * head_dim;
    i64 slot = slot_mapping[blockIdx.x];
    for (int head = warp; head < heads + 2 * kv_heads; head += warps) {
        u16* x = token + i64(head) * head_dim;
        if (head >= heads + kv_heads) {
            if (slot < 0) continue;
            i64 base = (slot * kv_heads + (head - heads - kv_heads)) * head_dim;
            for (int i = lane; i < head_dim; i += 32) store_kv(value_cache, base + i, bf16_to_float(x[i]), value_scale, kv_type);
            continue;
        }
        bool is_query = head < heads;
        const float* norm = is_query ? q_norm : k_norm;
        float inverse = 1.0f;
        if (norm != nullptr) {
            float sum = 0.0f;
            for (int i = lane; i < head_dim; i += 32) sum += bf16_to_float(x[i]) * bf16_to_float(x[i]);
            inverse = rsqrtf(warp_sum(sum) / float(head_dim) + eps);
        }
        i64 base = (slot * kv_heads + (head - heads)) * head_dim;
        for (int i = lane; i < half; i += 32) {
            float a = bf16_to_float(x[i]), b = bf16_to_float(x[i + half]);
            if (norm != nullptr) {
                a *= inverse * norm[i];
                b *= inverse * norm[i + half];
            }
            float low = a * angles[i] - b * angles[half + i], high = b * angles[i] + a * angles[half + i];
            if (is_query) {
                x[i] = float_to_bf16(low);
                x[i + half] = float_to_bf16(high);
            } else if (slot >= 0) {
                store_kv(key_cache, base + i, low, key_scale, kv_type);
                store_kv(key_cache, base + half + i, high, key_scale, kv_type);
            }
        }
    }
}
