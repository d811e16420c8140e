// Element types, conversions and PTX wrappers shared by all kernels. No CUDA headers are needed: NVRTC's built-in
// types and inline PTX are enough, so that a machine needs nothing but the compiler library.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

#define MINUS_INFINITY __uint_as_float(0xFF800000u)

// -- programmatic dependent launch -----------------------------------------------------------------------------------
// Every kernel waits for the kernels before it in the stream before it touches what they write, and lets the next
// one start its own prologue early. Both are no-ops in an ordinary launch.

DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// -- bfloat16 and float16 --------------------------------------------------------------------------------------------

DEVICE float bf16_to_float(u16 value) { return __uint_as_float(u32(value) << 16); }
DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

DEVICE u16 float_to_bf16(float value) {
    u16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}

DEVICE u32 pack_bf16(float low, float high) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

DEVICE u32 pack_f16(float low, float high) {
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

// a * b as fma(a, b, -0): bf16x2 has no plain multiplication before compute capability 9.0. Subnormals are kept.
DEVICE u32 multiply_bf16x2(u32 a, u32 b) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000u));
    return result;
}

// -- E4M3 ------------------------------------------------------------------------------------------------------------

// Round to nearest even, saturating at 448; NaN stays NaN.
DEVICE u8 float_to_e4m3(float value) {
#if __CUDA_ARCH__ >= 890
    u16 result;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(0.0f), "f"(value));
    return u8(result);
#else
    u32 bits = __float_as_uint(value);
    u32 sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return u8(sign | 0x7Fu);
    if (magnitude < 0x3C800000u)  // below 2^-6, the least normal: multiples of 2^-9
        return u8(sign | u32(__float2int_rn(__uint_as_float(magnitude) * 512.0f)));
    u32 rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
    u32 code = (rounded >> 20) - (120u << 3);
    return u8(sign | (code > 0x7Eu ? 0x7Eu : code));
#endif
}

DEVICE float e4m3_to_float(u8 code) {
    u32 magnitude = code & 0x7Fu;
    float value = __uint_as_float(magnitude << 20) * 1.329227995784916e36f;  // 2^120 moves the exponent bias 7 to 127
    if (magnitude == 0x7Fu) value = __uint_as_float(0x7FC00000u);
    return code & 0x80u ? -value : value;
}

// Two E4M3 in the low 16 bits to f16x2. Exact; `E4M3_F16_SCALE` times the result is the value.
#if __CUDA_ARCH__ >= 890
constexpr float E4M3_F16_SCALE = 1.0f;
DEVICE u32 e4m3x2_to_f16x2(u16 pair) {
    u32 result;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(pair));
    return result;
}
#else
constexpr float E4M3_F16_SCALE = 256.0f;  // exponent bias 7 read as 15
DEVICE u32 e4m3x2_to_f16x2(u16 pair) {
    u32 spread = __byte_perm(u32(pair), 0u, 0x1404);
    return (spread & 0x80008000u) | ((spread & 0x7F007F00u) >> 1);
}
#endif

// -- tensor cores ----------------------------------------------------------------------------------------------------
// Lane (g, t) = (lane / 4, lane % 4) holds, of D = A(16x16) B(16x8) + D:
//   a0 A[g][2t..]  a1 A[g+8][2t..]  a2 A[g][2t+8..]  a3 A[g+8][2t+8..]   b0 B[2t..][g]  b1 B[2t+8..][g]
//   d0 D[g][2t]  d1 D[g][2t+1]  d2 D[g+8][2t]  d3 D[g+8][2t+1]

DEVICE void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE u32 transpose_8x8_b16(u32 fragment) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
    return result;
}

DEVICE u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

DEVICE void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

DEVICE void load_matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// -- copies to shared memory -----------------------------------------------------------------------------------------

DEVICE void copy_async_16(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The first `bytes` (0 to 16) are copied, the rest is zero.
DEVICE void copy_async_16_zero_filled(u32 shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

DEVICE void copy_async_4(u32 shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

DEVICE uint4 load_shared(u32 shared) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(shared));
    return value;
}

DEVICE u32 load_shared_word(u32 shared) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(shared));
    return value;
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE float4 load_through_l2(const float4* pointer) {
    float4 value;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w) : "l"(pointer) : "memory");
    return value;
}

// -- reductions ------------------------------------------------------------------------------------------------------

DEVICE float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
    return value;
}

// Sum over a block of whole warps; `scratch` holds one float a warp. Every thread gets the sum.
DEVICE float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = value;
    __syncthreads();
    float total = 0.0f;
    for (int warp = 0; warp < int(blockDim.x >> 5); ++warp) total += scratch[warp];
    return total;
}
