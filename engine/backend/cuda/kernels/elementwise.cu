// Operations on rows of activations: embedding, RMS norms, SiLU-and-multiply, row gathering. Activations are bfloat16,
// arithmetic is float32. One block a row; `VECTOR` rows are read 16 bytes a thread, others element by element.
#include "common.cuh"

// Copies `bytes` of a row by 16-byte pieces where the row allows it.
DEVICE void copy_row(u16* to, const u16* from, int length) {
    if ((length & 7) == 0) {
        for (int i = threadIdx.x; i < length / 8; i += blockDim.x)
            reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    } else {
        for (int i = threadIdx.x; i < length; i += blockDim.x) to[i] = from[i];
    }
}

// out[t] = table[token_ids[t]]. Grid: tokens.
extern "C" __global__ void embedding(const int* token_ids, const u16* table, u16* out, int hidden) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    copy_row(out + i64(blockIdx.x) * hidden, table + i64(token_ids[blockIdx.x]) * hidden, hidden);
}

// out[r] = x[rows[r]]. Grid: rows.
extern "C" __global__ void gather_rows(const u16* x, const int* rows, u16* out, int hidden) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    copy_row(out + i64(blockIdx.x) * hidden, x + i64(rows[blockIdx.x]) * hidden, hidden);
}

constexpr int NORM_THREADS = 256;
constexpr int NORM_PIECES = 4;  // of 8 elements a thread keeps in registers

// With delta: residual += delta, rounded to bfloat16, then the norm of what was stored. Grid: rows. Rows of up to
// NORM_THREADS * NORM_PIECES * 8 elements in multiples of 8 are read once; others twice, the second time by the thread
// that wrote them.
template <bool ADD>
DEVICE void norm_row(u16* x, const u16* delta, const float* weight, u16* out, int hidden, float eps) {
    __shared__ float scratch[32];
    let_next_kernel_start();
    i64 offset = i64(blockIdx.x) * hidden;
    float sum = 0.0f;
    if ((hidden & 7) == 0 && hidden <= NORM_THREADS * NORM_PIECES * 8) {
        uint4* row = reinterpret_cast<uint4*>(x + offset);
        const uint4* add = reinterpret_cast<const uint4*>(delta + offset);
        uint4* result = reinterpret_cast<uint4*>(out + offset);
        uint4 pieces[NORM_PIECES];
        wait_for_previous_kernel();
#pragma unroll
        for (int p = 0; p < NORM_PIECES; ++p) {
            int i = p * NORM_THREADS + threadIdx.x;
            if (i >= hidden / 8) break;
            pieces[p] = row[i];
            if (ADD) {
                uint4 other = add[i];
                u32 *words = &pieces[p].x, *others = &other.x;
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    words[j] = pack_bf16(bf16_low(words[j]) + bf16_low(others[j]), bf16_high(words[j]) + bf16_high(others[j]));
                row[i] = pieces[p];
            }
        }
#pragma unroll
        for (int p = 0; p < NORM_PIECES; ++p) {
            if (p * NORM_THREADS + threadIdx.x >= hidden / 8) break;
            const u32* words = &pieces[p].x;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                sum += bf16_low(words[j]) * bf16_low(words[j]) + bf16_high(words[j]) * bf16_high(words[j]);
        }
        float inverse = rsqrtf(block_sum(sum, scratch) / float(hidden) + eps);
#pragma unroll
        for (int p = 0; p < NORM_PIECES; ++p) {
            int i = p * NORM_THREADS + threadIdx.x;
            if (i >= hidden / 8) break;
            float4 low = reinterpret_cast<const float4*>(weight)[2 * i], high = reinterpret_cast<const float4*>(weight)[2 * i + 1];
            const float factors[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            u32* words = &pieces[p].x;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                words[j] = pack_bf16(bf16_low(words[j]) * inverse * factors[2 * j], bf16_high(words[j]) * inverse * factors[2 * j + 1]);
            result[i] = pieces[p];
        }
        return;
    }
    wait_for_previous_kernel();
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
        float value = bf16_to_float(x[offset + i]);
        if (ADD) {
            u16 rounded = float_to_bf16(value + bf16_to_float(delta[offset + i]));
            x[offset + i] = rounded;
            value = bf16_to_float(rounded);
        }
        sum += value * value;
    }
    float inverse = rsqrtf(block_sum(sum, scratch) / float(hidden) + eps);
    for (int i = threadIdx.x; i < hidden; i += blockDim.x)
        out[offset + i] = float_to_bf16(bf16_to_float(x[offset + i]) * inverse * weight[i]);
}

extern "C" __global__ void rms_norm(const u16* x, const float* weight, u16* out, int hidden, float eps) {
    norm_row<false>(const_cast<u16*>(x), x, weight, out, hidden, eps);
}

extern "C" __global__ void add_rms_norm(u16* residual, const u16* delta, const float* weight, u16* out, int hidden, float eps) {
    norm_row<true>(residual, delta, weight, out, hidden, eps);
}

DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// out = silu(gate_up[:, :I]) * gate_up[:, I:]. Grid: (tokens, pieces of the row).
extern "C" __global__ void silu_and_mul(const u16* gate_up, u16* out, int intermediate) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const u16* gate = gate_up + i64(blockIdx.x) * 2 * intermediate;
    const u16* up = gate + intermediate;
    u16* result = out + i64(blockIdx.x) * intermediate;
    int first = blockIdx.y * blockDim.x + threadIdx.x, stride = gridDim.y * blockDim.x;
    if ((intermediate & 7) == 0) {
        for (int i = first; i < intermediate / 8; i += stride) {
            uint4 g = reinterpret_cast<const uint4*>(gate)[i], u = reinterpret_cast<const uint4*>(up)[i];
            u32 *gates = &g.x, *ups = &u.x;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                gates[j] = pack_bf16(silu(bf16_low(gates[j])) * bf16_low(ups[j]), silu(bf16_high(gates[j])) * bf16_high(ups[j]));
            reinterpret_cast<uint4*>(result)[i] = g;
        }
    } else {
        for (int i = first; i < intermediate; i += stride)
            result[i] = float_to_bf16(silu(bf16_to_float(gate[i])) * bf16_to_float(up[i]));
    }
}
