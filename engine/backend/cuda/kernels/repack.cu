// Checkpoint weights, row-major, into the resident layouts of formats.cuh.
//
// Both kernels write rows [first_row, first_row + rows) of the resident matrix of `row_blocks` blocks, whose memory was zeroed. A word holds
// elements of two rows of a block: where a block reaches over the given rows, words are merged atomically.
#include "formats.cuh"

DEVICE void put_word(u32* target, u32 word, bool exclusive) {
    if (exclusive)
        *target = word;
    else
        atomicOr(target, word);
}

// Where the bits of a bfloat16-shaped pair (bits 6-8 and 15 of each half) go in the word: inverse of decode_codes.
DEVICE u32 place_pair(u32 pair, int place) {
    switch (place) {
        case 0: return pair;
        case 1: return pair >> 3;
        case 2: return ((pair & 0x01C001C0u) >> 6) | ((pair & 0x80008000u) >> 2);
        default: return ((pair & 0x01C001C0u) << 3) | ((pair & 0x80008000u) >> 1);
    }
}

DEVICE u32 spread_code(u32 code) { return ((code & 7u) << 6) | ((code & 8u) << 12); }

// E4M3 without its sign to five exponent and three mantissa bits; 2^-9, the least positive, is zero.
DEVICE u8 encode_scale(u32 e4m3) {
    u32 m = e4m3 & 0x7Fu;
    if (m >= 8) return u8(m + 16);
    if (m >= 4) return u8(2 * 8 + (m - 4) * 2);
    if (m >= 2) return u8(1 * 8 + (m - 2) * 4);
    return 0;
}

// codes [rows, columns / 2], scales [rows, columns / 16]. Grid: (units, row blocks); block: 256 threads, 8 warps for
// the g, 32 lanes for (half, t, j).
extern "C" __global__ void repack_nvfp4(const u8* codes, const u8* scales, u8* resident, int first_row, int rows, int columns,
                                        int units, int row_blocks) {
    int block = first_row / BLOCK_ROWS + blockIdx.y, unit = blockIdx.x;
    int g = threadIdx.x >> 5, half = (threadIdx.x >> 4) & 1, t = (threadIdx.x >> 2) & 3, j = threadIdx.x & 3;
    int column = unit * UNIT_COLUMNS + half * 64 + t * 16 + j * 4;
    u8* target = resident + unit_place(block, unit, units, row_blocks) * Nvfp4::UNIT_BYTES;
    int lane = g * 4 + t;
    bool exclusive = block * BLOCK_ROWS >= first_row && (block + 1) * BLOCK_ROWS <= first_row + rows;
    u32 word = 0;
    for (int lower = 0; lower < 2; ++lower) {
        int row = block * BLOCK_ROWS + fragment_row(g, lower) - first_row;
        if (row < 0 || row >= rows || column >= columns) continue;
        u32 scale = scales[i64(row) * (columns / 16) + column / 16];
        const u8* source = codes + i64(row) * (columns / 2) + column / 2;
        u32 four = u32(source[0]) | u32(source[1]) << 8;
        if ((scale & 0x7Fu) == 0)
            four = 0;
        else if (scale & 0x80u)
            four ^= 0x8888u;
        word |= place_pair(spread_code(four & 15u) | spread_code((four >> 4) & 15u) << 16, lower);
        word |= place_pair(spread_code((four >> 8) & 15u) | spread_code(four >> 12) << 16, 2 + lower);
        if (j == 0) target[1024 + lane * 4 + half * 2 + lower] = encode_scale(scale);
    }
    put_word(reinterpret_cast<u32*>(target + half * 512 + lane * 16) + j, word, exclusive);
}

// weight [rows, columns] E4M3. Grid and block as above.
extern "C" __global__ void repack_fp8(const u8* weight, u8* resident, int first_row, int rows, int columns, int units,
                                      int row_blocks) {
    int block = first_row / BLOCK_ROWS + blockIdx.y, unit = blockIdx.x;
    int g = threadIdx.x >> 5, half = (threadIdx.x >> 4) & 1, t = (threadIdx.x >> 2) & 3, j = threadIdx.x & 3;
    int column = unit * UNIT_COLUMNS + half * 64 + t * 16 + j * 4;
    u8* target = resident + unit_place(block, unit, units, row_blocks) * Fp8::UNIT_BYTES;
    int lane = g * 4 + t;
    bool exclusive = block * BLOCK_ROWS >= first_row && (block + 1) * BLOCK_ROWS <= first_row + rows;
    u32 words[2] = {0, 0};
    for (int lower = 0; lower < 2; ++lower) {
        int row = block * BLOCK_ROWS + fragment_row(g, lower) - first_row;
        if (row < 0 || row >= rows) continue;
        const u8* source = weight + i64(row) * columns;
        for (int i = 0; i < 4; ++i) {
            u32 value = column + i < columns ? source[column + i] : 0u;
            // The upper row in the high byte of a half word, the lower in the low one; even columns in the low half.
            words[i >> 1] |= value << ((i & 1) * 16 + (lower ? 0 : 8));
        }
    }
    u32* place = reinterpret_cast<u32*>(target + (half * 2 + (j >> 1)) * 512 + lane * 16) + (j & 1) * 2;
    put_word(place, words[0], exclusive);
    put_word(place + 1, words[1], exclusive);
}
