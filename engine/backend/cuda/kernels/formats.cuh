// How resident weights lie in memory, and how a lane turns them into tensor-core fragments.
//
// Rows are grouped in blocks of 16, columns in units of 128 (two halves of 64). In one half, lane (g, t) of a warp owns
// two rows, upper and lower, and 16 columns, and four mma.m16n8k16 steps j = 0..3 take 4 of its columns each. As the sum
// over k has no order, the columns of a step may be any, if the activations are read alike: no shuffle and no ldmatrix is
// needed. Nor have the rows of a block an order: the upper row of g is row 4 (g / 2) + g % 2, the lower two further, so
// that of a transposed fragment each lane holds four neighbours.
//
//   NVFP4  lane columns 16t..16t+15 of the half: one scale group, so one scale a row a half.
//          unit = 1024 bytes of codes [half][lane][16] + 128 bytes of scales [lane][half][upper, lower] = 1152 bytes
//   FP8    lane columns as NVFP4. unit = 2048 bytes [half][j / 2][lane][16]
//   BF16   row-major as in the checkpoint (it can serve as the embedding table); lane columns 8t..8t+7 and
//          32+8t..32+8t+7 of the half, so that four lanes read 64 bytes together
//
// Units follow each other by groups of 8 row blocks (the last may have fewer), in a group by units, in a unit by blocks: one
// copy brings the same columns of a whole group.
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
constexpr int GROUP_BLOCKS = 8;

// Row in its block that a lane's upper (0) or lower (1) fragment row stands for.
DEVICE int fragment_row(int g, int lower) { return (g >> 1) * 4 + lower * 2 + (g & 1); }

// Where a unit lies, counted in units; the next unit of the same block is `group_width` further.
DEVICE int group_width(int block, int row_blocks) { return min(row_blocks - block / GROUP_BLOCKS * GROUP_BLOCKS, GROUP_BLOCKS); }

DEVICE i64 unit_place(int block, int unit, int units, int row_blocks) {
    return i64(block / GROUP_BLOCKS * GROUP_BLOCKS) * units + unit * group_width(block, row_blocks) + block % GROUP_BLOCKS;
}

struct Nvfp4 {
    static constexpr int UNIT_BYTES = 1152;
    static constexpr int X_PAD = 16;

    // Byte of a half's activations where the lane's first and second 16 bytes begin.
    static DEVICE int activation_offset(int t, int piece) { return t * 32 + piece * 16; }

    // Each lane copies what it will read itself.
    static DEVICE void copy_unit(u32 slot, const u8* source, int lane) {
        copy_async_16(slot + lane * 16, source + lane * 16);
        copy_async_16(slot + 512 + lane * 16, source + 512 + lane * 16);
        copy_async_4(slot + 1024 + lane * 4, source + 1024 + lane * 4);
    }

    static DEVICE void load_unit(u32 slot, const u8* weight, int block, int unit, int lane, int rows, int, int units) {
        int row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        copy_unit(slot, weight + unit_place(block, unit, units, row_blocks) * UNIT_BYTES, lane);
    }

    // The pairs of a word, as bfloat16x2 times 2^-126: magnitude in bits 6-8 of each half word, sign in bit 15. No four
    // shifts of those bits are disjoint, so that two pairs are put together. All shifts but one are to the left: those can
    // be multiplications, which spares the integer pipe, the one that these kernels keep busiest.
    static DEVICE void decode_codes(u32 word, u32 (&pairs)[4]) {
        pairs[0] = word & 0x81C081C0u;
        pairs[1] = (word << 3) & 0x81C081C0u;
        pairs[2] = ((word << 6) & 0x01C001C0u) | ((word << 2) & 0x80008000u);
        pairs[3] = ((word >> 3) & 0x01C001C0u) | ((word << 1) & 0x80008000u);
    }

    // `scales`: of the upper row in the low byte, of the lower in the next.
    static DEVICE void decode(uint4 codes, u32 scales, u32 (&a)[4][4]) {
        u32 upper = __byte_perm(scales, 0u, 0x4040) * 16u + 0x70007000u;
        u32 lower = __byte_perm(scales, 0u, 0x4141) * 16u + 0x70007000u;
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

    // The same by shared addresses: of the lane's 16 bytes of codes, and of its scales.
    static DEVICE void fragments(u32 codes, u32 scales, int half, u32 (&a)[4][4]) {
        u32 both = load_shared_word(scales);
        decode(load_shared(codes + half * 512), half ? both >> 16 : both, a);
    }

    static DEVICE void fragments(const u8* slot, int half, int lane, u32 (&a)[4][4]) {
        fragments(shared_address(slot) + lane * 16, shared_address(slot) + 1024 + lane * 4, half, a);
    }
};

struct Fp8 {
    static constexpr int UNIT_BYTES = 2048;
    static constexpr int X_PAD = 16;

    static DEVICE int activation_offset(int t, int piece) { return t * 32 + piece * 16; }

    static DEVICE void load_unit(u32 slot, const u8* weight, int block, int unit, int lane, int rows, int, int units) {
        int row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        copy_unit(slot, weight + unit_place(block, unit, units, row_blocks) * UNIT_BYTES, lane);
    }

    // E4M3 in the high byte of each half word: its bits read as bfloat16 are value * 2^-120.
    static DEVICE u32 decode(u32 bytes) {
        return multiply_bf16x2((bytes & 0x80008000u) | ((bytes & 0x7F007F00u) >> 4), 0x7B807B80u);
    }

    // Two steps.
    static DEVICE void decode(uint4 chunk, u32 (&even)[4], u32 (&odd)[4]) {
        even[0] = decode(chunk.x), even[1] = decode(chunk.x << 8), even[2] = decode(chunk.y), even[3] = decode(chunk.y << 8);
        odd[0] = decode(chunk.z), odd[1] = decode(chunk.z << 8), odd[2] = decode(chunk.w), odd[3] = decode(chunk.w << 8);
    }

    static DEVICE void fragments(u32 weights, u32, int half, u32 (&a)[4][4]) {
        decode(load_shared(weights + half * 1024), a[0], a[1]);
        decode(load_shared(weights + half * 1024 + 512), a[2], a[3]);
    }

    static DEVICE void fragments(const u8* slot, int half, int lane, u32 (&a)[4][4]) {
        fragments(shared_address(slot) + lane * 16, 0, half, a);
    }

    static DEVICE void copy_unit(u32 slot, const u8* source, int lane) {
#pragma unroll
        for (int chunk = 0; chunk < 4; ++chunk)
            copy_async_16(slot + chunk * 512 + lane * 16, source + chunk * 512 + lane * 16);
    }
};

struct Bf16 {
    static constexpr int UNIT_BYTES = 4096;
    static constexpr int X_PAD = 64;

    static DEVICE int activation_offset(int t, int piece) { return piece * 64 + t * 16; }

    // Slot: [half][upper, lower][piece][lane][16]. Rows past the end are read as the last one, columns as zero.
    static DEVICE void load_unit(u32 slot, const u8* weight, int block, int unit, int lane, int rows, int columns, int) {
        int g = lane >> 2, t = lane & 3;
        const u16* matrix = reinterpret_cast<const u16*>(weight);
#pragma unroll
        for (int chunk = 0; chunk < 8; ++chunk) {
            int half = chunk >> 2, lower = (chunk >> 1) & 1, piece = chunk & 1;
            int row = min(block * BLOCK_ROWS + fragment_row(g, lower), rows - 1);
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
