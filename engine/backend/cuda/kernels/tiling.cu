// Activations as linear_hopper.cuh reads them.
#include "common.cuh"

// x [tokens, columns] to atoms [128 columns][8 tokens][64 columns] of 1024 bytes, 16 bytes of 8 columns a lane. In an atom row the
// 16 bytes c hold columns 2c and 2c+1 of each of the four scale groups, which is the order in which fragments hold
// weights, and lie at place c ^ (token % 8): the 128-byte swizzle. Columns past the end are zero.
// Grid: ceil(tokens * ceil(units * 2 / 4) / 8); block: 8 warps, each 4 atom rows of a token. columns % 8 == 0.
extern "C" __global__ void tile_activations(const u16* x, u8* tiles, int tokens, int columns, int column_tiles) {
    __shared__ u32 words[8][4][32];
    let_next_kernel_start();
    wait_for_previous_kernel();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, chunk = lane & 7;
    int quarters = (column_tiles + 3) / 4;
    int index = blockIdx.x * 8 + warp, token = index / quarters, column_tile = index % quarters * 4 + (lane >> 3);
    if (token >= tokens) return;
    int column = column_tile * 64 + chunk * 8;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (column < columns) value = *reinterpret_cast<const uint4*>(x + i64(token) * columns + column);
    u32* row = words[warp][lane >> 3];
    *reinterpret_cast<uint4*>(row + chunk * 4) = value;
    __syncwarp();
    if (column_tile >= column_tiles) return;
    uint4 mixed = make_uint4(row[chunk], row[8 + chunk], row[16 + chunk], row[24 + chunk]);
    i64 atom = (i64(column_tile / 2) * ((tokens + 7) / 8) + token / 8) * 2 + column_tile % 2;
    *reinterpret_cast<uint4*>(tiles + atom * 1024 + (token & 7) * 128 + ((chunk ^ (token & 7)) * 16)) = mixed;
}
