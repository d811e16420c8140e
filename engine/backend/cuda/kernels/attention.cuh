// What the attention kernels share: the shape of a call, and how cached values become 16-bit matrix operands.
//
// FP8 caches are read as float16, which holds every E4M3 value; bfloat16 caches as bfloat16. Scales stay outside of the
// products: the key scale multiplies the scores, the value scale the result.
#pragma once
#include "common.cuh"

struct AttentionShape {
    int heads, kv_heads, block_size, max_blocks;
    int window;         // a token sees itself and window - 1 before it; 0: all
    float score_scale;  // multiplies q·k: softmax scale, key scale and log2(e)
    float out_scale;    // multiplies the result: value scale

    DEVICE int group() const { return heads / kv_heads; }
    DEVICE int first_visible(int position) const { return window > 0 ? max(position - window + 1, 0) : 0; }
};

struct Fp8Cache {
    static constexpr int BYTES = 1;
    static constexpr float SCALE = E4M3_F16_SCALE;
    static DEVICE u32 pack(float low, float high) { return pack_f16(low, high); }
    static DEVICE u32 pack_query(u32 pair) { return pack_f16(bf16_low(pair), bf16_high(pair)); }
    static DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        mma_f16(d, a0, a1, a2, a3, b0, b1);
    }
    // Elements 4i..4i+3 of a lane's words as two pairs.
    template <int WORDS>
    static DEVICE void four(const u32 (&words)[WORDS], int i, u32& first, u32& second) {
        first = e4m3x2_to_f16x2(u16(words[i]));
        second = e4m3x2_to_f16x2(u16(words[i] >> 16));
    }
    // Element pairs (a[2i], b[2i]) and (a[2i+1], b[2i+1]).
    template <int WORDS>
    static DEVICE void zip(const u32 (&a)[WORDS], const u32 (&b)[WORDS], int i, u32& even, u32& odd) {
        u32 mixed = __byte_perm(a[i >> 1], b[i >> 1], i & 1 ? 0x7362 : 0x5140);
        even = e4m3x2_to_f16x2(u16(mixed));
        odd = e4m3x2_to_f16x2(u16(mixed >> 16));
    }
};

struct Bf16Cache {
    static constexpr int BYTES = 2;
    static constexpr float SCALE = 1.0f;
    static DEVICE u32 pack(float low, float high) { return pack_bf16(low, high); }
    static DEVICE u32 pack_query(u32 pair) { return pair; }
    static DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        mma_bf16(d, a0, a1, a2, a3, b0, b1);
    }
    template <int WORDS>
    static DEVICE void four(const u32 (&words)[WORDS], int i, u32& first, u32& second) {
        first = words[2 * i];
        second = words[2 * i + 1];
    }
    template <int WORDS>
    static DEVICE void zip(const u32 (&a)[WORDS], const u32 (&b)[WORDS], int i, u32& even, u32& odd) {
        even = __byte_perm(a[i], b[i], 0x5410);
        odd = __byte_perm(a[i], b[i], 0x7632);
    }
};

// `WORDS` 4-byte words from 8- or 16-byte aligned memory.
template <int WORDS>
DEVICE void load_words(u32* words, const u8* source) {
    if constexpr (WORDS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < WORDS / 4; ++i) {
            uint4 value = reinterpret_cast<const uint4*>(source)[i];
            words[4 * i] = value.x, words[4 * i + 1] = value.y, words[4 * i + 2] = value.z, words[4 * i + 3] = value.w;
        }
    } else {
        static_assert(WORDS == 2, "a lane's share of a head is 8 bytes or a multiple of 16");
        uint2 value = *reinterpret_cast<const uint2*>(source);
        words[0] = value.x, words[1] = value.y;
    }
}
