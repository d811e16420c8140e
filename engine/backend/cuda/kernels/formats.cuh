// How resident weights lie in memory, and how a lane turns them into tensor-core fragments.
//
// Rows are grouped in blocks of 16, columns in units of 128 (two halves of 64). In one half, lane (g, t) of a warp owns
// rows g and g+8 and 16 columns, and four mma.m16n8k16 steps j = 0..3 take 4 of its columns each. As the sum over k has
// no order, the columns of a step may be any, if the activations are read alike: no shuffle and no ldmatrix is needed.
//
//   NVFP4  lane columns 16t..16t+15 of the half: one scale group, so one scale a row a half.
//          unit = 1024 bytes of codes [half][lane][16] + 128 bytes of scales [lane][half][row g, row g+8] = 1152 bytes
//   FP8    lane columns as NVFP4. unit = 2048 bytes [half][j / 2][lane][16]
//   BF16   row-major as in the checkpoint (it can serve as the embedding table); lane columns 8t..8t+7 and
//          32+8t..32+8t+7 of the half, so that four lanes read 64 bytes together
//
// NVFP4: word j of a lane's 16 bytes holds the four pairs of step j; see `decode_codes` for the places of their bits.
// A scale is stored as five exponent and three mantissa bits without sign: E4M3's subnormals become normal numbers, zero
// is expressed by zero codes and a negative scale by negated codes. Codes are decoded to value * 2^-126 and scales to
// value * 2^106, both exactly; their product, at most six significant bits, is exact in bfloat16. The caller's row scale
// carries the missing 2^20.
#pragma once
#include "common.cuh"

constexpr int UNIT_COLUMNS = 128;
constexpr int BLOCK_ROWS = 16;

struct Nvfp4 {
    static constexpr int UNIT_BYTES = 1152;
    static constexpr int X_PAD = 16;

    // Byte of a half's activations where the lane's first and second 16 bytes begin.
    static DEVICE int activation_offset(int t, int piece) { return t * 32 + piece * 16; }

    static DEVICE void load_unit(u32 slot, const u8* weight, int block, int unit, int lane, int, int, int units) {
        const u8* source = weight + (i64(block) * units + unit) * UNIT_BYTES;
        copy_async_16(slot + lane * 16, source + lane * 16);
        copy_async_16(slot + 512 + lane * 16, source + 512 + lane * 16);
        copy_async_4(slot + 1024 + lane * 4, source + 1024 + lane * 4);
    }

    // The pairs of a word, as bfloat16x2 times 2^-126: bits 6-8 and 15 of each half word. Three pairs are rotations of
    // the word; no four rotations of those bits are disjoint, so that the last is put together from three pieces.
    static DEVICE void decode_codes(u32 word, u32 (&pairs)[4]) {
        pairs[0] = word & 0x81C081C0u;
        pairs[1] = __funnelshift_r(word, word, 3) & 0x81C081C0u;
        pairs[2] = __funnelshift_r(word, word, 6) & 0x81C081C0u;
        pairs[3] = ((word << 7) & 0x01800180u) | ((word << 3) & 0x00400040u) | ((word << 11) & 0x80008000u);
    }

    static DEVICE void fragments(const u8* slot, int half, int lane, u32 (&a)[4][4]) {
        uint4 codes = *reinterpret_cast<const uint4*>(slot + half * 512 + lane * 16);
        u32 scales = *reinterpret_cast<const u16*>(slot + 1024 + lane * 4 + half * 2);
        u32 upper = __byte_perm(scales, 0u, 0x4040) * 16u + 0x70007000u;  // row g, twice
        u32 lower = __byte_perm(scales, 0u, 0x4141) * 16u + 0x70007000u;  // row g + 8
        const u32* words = &codes.x;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            decode_codes(words[j], a[j]);
            a[j][0] = multiply_bf16x2(a[j][0], upper);
            a[j][1] = multiply_bf16x2(a[j][1], lower);
            a[j][2] = multiply_bf16x2(a[j][2], upper);
            a[j][3] = multiply_bf16x2(a[j][3], lower);
        }
    }
};

struct Fp8 {
    static constexpr int UNIT_BYTES = 2048;
    static constexpr int X_PAD = 16;

    static DEVICE int activation_offset(int t, int piece) { return t * 32 + piece * 16; }

    static DEVICE void load_unit(u32 slot, const u8* weight, int block, int unit, int lane, int, int, int units) {
        const u8* source = weight + (i64(block) * units + unit) * UNIT_BYTES;
#pragma unroll
        for (int chunk = 0; chunk < 4; ++chunk)
            copy_async_16(slot + chunk * 512 + lane * 16, source + chunk * 512 + lane * 16);
    }

    // E4M3 in the high byte of each half word: its bits read as bfloat16 are value * 2^-120.
    static DEVICE u32 decode(u32 bytes) {
        return multiply_bf16x2((bytes & 0x80008000u) | ((bytes & 0x7F007F00u) >> 4), 0x7B807B80u);
    }

    static DEVICE void fragments(const u8* slot, int half, int lane, u32 (&a)[4][4]) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            uint4 chunk = *reinterpret_cast<const uint4*>(slot + (half * 2 + pair) * 512 + lane * 16);
            const u32* words = &chunk.x;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32(&step)[4] = a[pair * 2 + i];
                step[0] = decode(words[2 * i]);
                step[1] = decode(words[2 * i] << 8);
                step[2] = decode(words[2 * i + 1]);
                step[3] = decode(words[2 * i + 1] << 8);
            }
        }
    }
};

struct Bf16 {
    static constexpr int UNIT_BYTES = 4096;
    static constexpr int X_PAD = 64;

    static DEVICE int activation_offset(int t, int piece) { return piece * 64 + t * 16; }

    // Slot: [half][row g, row g+8][piece][lane][16]. Rows past the end are read as the last one, columns as zero.
    static DEVICE void load_unit(u32 slot, const u8* weight, int block, int unit, int lane, int rows, int columns, int) {
        int g = lane >> 2, t = lane & 3;
        const u16* matrix = reinterpret_cast<const u16*>(weight);
#pragma unroll
        for (int chunk = 0; chunk < 8; ++chunk) {
            int half = chunk >> 2, lower = (chunk >> 1) & 1, piece = chunk & 1;
            int row = min(block * BLOCK_ROWS + lower * 8 + g, rows - 1);
            int column = unit * UNIT_COLUMNS + half * 64 + piece * 32 + t * 8;
            u32 target = slot + chunk * 512 + lane * 16;
            int bytes = min(max(columns - column, 0), 8) * 2;
            const u16* source = matrix + i64(row) * columns + (bytes > 0 ? column : 0);
            if ((columns & 7) == 0) {
                copy_async_16_zero_filled(target, source, bytes);
            } else {
                for (int i = 0; i < 8; ++i) {
                    u16 value = i * 2 < bytes ? source[i] : u16(0);
                    asm volatile("st.shared.u16 [%0], %1;" ::"r"(target + i * 2), "h"(value) : "memory");
                }
            }
        }
    }

    static DEVICE void fragments(const u8* slot, int half, int lane, u32 (&a)[4][4]) {
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
#pragma unroll
            for (int piece = 0; piece < 2; ++piece) {
                uint4 chunk = *reinterpret_cast<const uint4*>(slot + (half * 4 + lower * 2 + piece) * 512 + lane * 16);
                a[piece * 2][lower] = chunk.x;
                a[piece * 2][2 + lower] = chunk.y;
                a[piece * 2 + 1][lower] = chunk.z;
                a[piece * 2 + 1][2 + lower] = chunk.w;
            }
        }
    }
};
