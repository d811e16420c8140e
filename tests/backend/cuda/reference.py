"""What the kernels are compared with: NumPy in float64, and a model of the resident weight layouts."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from engine.backend.protocol import KVLayer, LinearSource, StepBatch, WeightFormat

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BLOCK_ROWS, UNIT_COLUMNS, GROUP_BLOCKS = 16, 128, 8


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, in its carrier."""
    return np.ascontiguousarray(values).astype(ml_dtypes.bfloat16).view(np.uint16)


def from_bf16(carrier: np.ndarray) -> np.ndarray:
    return carrier.view(ml_dtypes.bfloat16).astype(np.float64)


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Rounded to E4M3, saturating, in its carrier."""
    clipped = np.clip(values, -448, 448).astype(np.float32)
    return clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def from_e4m3(carrier: np.ndarray) -> np.ndarray:
    return carrier.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """‖found - expected‖ / ‖expected‖; NaN is infinitely wrong."""
    difference = np.linalg.norm((found - expected).ravel())
    norm = np.linalg.norm(expected.ravel())
    if difference == 0:
        return 0.0
    return float(difference / norm) if np.isfinite(difference) and norm > 0 else np.inf


# -- linear layers -----------------------------------------------------------------------------------------


def codes_of(packed: np.ndarray) -> np.ndarray:
    """4-bit codes [N, K] of packed ones [N, K/2], even columns in the low nibble."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)


def dense(source: LinearSource) -> np.ndarray:
    """The layer's weight, float64 [N, K]."""
    if source.format is WeightFormat.BF16:
        return from_bf16(source.weight)
    if source.format is WeightFormat.FP8:
        return from_e4m3(source.weight) * np.float32(source.global_scale)
    scales = from_e4m3(source.group_scales).repeat(16, axis=1)
    return E2M1[codes_of(source.weight)] * scales * np.float32(source.global_scale)


def random_linear(
    rng: np.random.Generator, format: WeightFormat, rows: int, columns: int, *, bias: bool = False
) -> LinearSource:
    """A layer of random weights, with scales over all of E4M3 in its first rows."""
    scales = None
    global_scale = 1.0
    if format is WeightFormat.NVFP4:
        weight = rng.integers(0, 256, (rows, columns // 2), np.uint8)
        scales = rng.integers(0x28, 0x48, (rows, columns // 16), np.uint8)
        # Zero, subnormal and negative scales appear, yet do not decide the result.
        scales[::7] = rng.integers(0, 0x38, scales[::7].shape, np.uint8)
        scales[3::11] |= 0x80
        scales[0, 0] = 0
        global_scale = float(rng.uniform(0.001, 0.02))
    elif format is WeightFormat.FP8:
        weight = to_e4m3(rng.normal(0, 2, (rows, columns)))
        weight[::9] = to_e4m3(rng.normal(0, 0.004, weight[::9].shape))
        global_scale = float(rng.uniform(0.001, 0.02))
    else:
        weight = to_bf16(rng.normal(0, 0.02, (rows, columns)))
    return LinearSource(
        name=f"{format.value}-{rows}x{columns}",
        format=format,
        shape=(rows, columns),
        weight=weight,
        group_scales=scales,
        global_scale=global_scale,
        bias=rng.normal(0, 1, rows).astype(np.float32) if bias else None,
    )


# -- resident layouts --------------------------------------------------------------------------------------


def place_codes(codes: np.ndarray, place: int) -> np.ndarray:
    """Bits of a word that hold the pair of 4-bit codes [..., 2] at `place` 0..3."""
    codes = codes.astype(np.uint32)
    halves = ((codes & 7) << 6) | ((codes & 8) << 12)
    pair = halves[..., 0] | halves[..., 1] << np.uint32(16)
    magnitudes, signs = pair & 0x01C001C0, pair & 0x80008000
    if place == 0:
        return pair
    if place == 1:
        return pair >> 3
    return magnitudes >> 6 | signs >> 2 if place == 2 else magnitudes << 3 | signs >> 1


def decode_word(words: np.ndarray) -> np.ndarray:
    """The kernels' decoding: bfloat16 carriers [..., 4 places, 2], values times 2^-126."""
    third = (words << 6 & 0x01C001C0) | (words << 2 & 0x80008000)
    fourth = (words >> 3 & 0x01C001C0) | (words << 1 & 0x80008000)
    pairs = np.stack([words & 0x81C081C0, words << 3 & 0x81C081C0, third, fourth], axis=-1)
    return np.stack([pairs & 0xFFFF, pairs >> 16], axis=-1).astype(np.uint16)


def encode_scale(e4m3: np.ndarray) -> np.ndarray:
    """E4M3 magnitudes as five exponent and three mantissa bits, from 2^-9."""
    values = from_e4m3(e4m3 & 0x7F)
    mantissa, exponent = np.frexp(np.where(values > 0, values, 2.0**-9))
    return ((exponent - 1 + 9) * 8 + (mantissa * 2 - 1) * 8).astype(np.uint8)


def decode_scale(encoded: np.ndarray) -> np.ndarray:
    """bfloat16 carriers, values times 2^106."""
    return (encoded.astype(np.uint16) << 4) + np.uint16(0x7000)


def fragment_rows(matrix: np.ndarray) -> np.ndarray:
    """Rows of each block in the order of fragments: first the upper ones of g = 0..7, then the lower."""
    blocks = matrix.reshape(-1, 4, 2, 2, matrix.shape[1])  # [block, g / 2, lower, g % 2]
    return blocks.transpose(0, 2, 1, 3, 4).reshape(matrix.shape)


def matrix_rows(matrix: np.ndarray) -> np.ndarray:
    """Inverse of `fragment_rows`."""
    blocks = matrix.reshape(-1, 2, 4, 2, matrix.shape[1])  # [block, lower, g / 2, g % 2]
    return blocks.transpose(0, 2, 1, 3, 4).reshape(matrix.shape)


def by_groups(blocks: np.ndarray) -> np.ndarray:
    """Resident bytes of units [row blocks, units, bytes]: by groups of 8 blocks, in a group by units."""
    groups = [blocks[begin : begin + GROUP_BLOCKS] for begin in range(0, len(blocks), GROUP_BLOCKS)]
    return np.concatenate([group.transpose(1, 0, 2).ravel() for group in groups])


def by_blocks(resident: np.ndarray, blocks: int, units: int) -> np.ndarray:
    """Inverse of `by_groups`."""
    unit_bytes = resident.size // (blocks * units)
    result = np.empty((blocks, units, unit_bytes), np.uint8)
    for begin in range(0, blocks, GROUP_BLOCKS):
        group = result[begin : begin + GROUP_BLOCKS]
        first = begin * units * unit_bytes
        flat = resident[first : first + group.size]
        group[:] = flat.reshape(units, len(group), unit_bytes).transpose(1, 0, 2)
    return result


def pack_nvfp4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Resident bytes of codes [N, K] and E4M3 scales [N, K/16]."""
    rows, columns = codes.shape
    blocks, units = -(-rows // BLOCK_ROWS), -(-columns // UNIT_COLUMNS)
    wide_scales = scales.repeat(16, axis=1)
    codes = np.where(wide_scales & 0x7F, codes ^ np.where(wide_scales & 0x80, 8, 0), 0)
    padded = np.zeros((blocks * BLOCK_ROWS, units * UNIT_COLUMNS), np.uint8)
    padded[:rows, :columns] = codes
    encoded = np.zeros((blocks * BLOCK_ROWS, units * UNIT_COLUMNS // 16), np.uint8)
    encoded[:rows, : columns // 16] = encode_scale(scales)
    result = np.zeros((blocks, units, 1152), np.uint8)
    # [block, lower, g, unit, half, t, j, pair, 2]
    tiles = fragment_rows(padded).reshape(blocks, 2, 8, units, 2, 4, 4, 2, 2)
    words = np.zeros((blocks, units, 2, 8, 4, 4), np.uint32)  # [block, unit, half, g, t, j]
    for lower in range(2):
        for pair in range(2):
            placed = place_codes(tiles[:, lower, :, :, :, :, :, pair], 2 * pair + lower)
            words |= placed.transpose(0, 2, 3, 1, 4, 5)
    result[..., :1024] = words.reshape(blocks, units, -1).view(np.uint8)
    # [block, unit, g, t, half, lower]
    scale_tiles = fragment_rows(encoded).reshape(blocks, 2, 8, units, 2, 4).transpose(0, 3, 2, 5, 4, 1)
    result[..., 1024:] = scale_tiles.reshape(blocks, units, 128)
    return by_groups(result)


def unpack_nvfp4(resident: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The weights as the kernels see them, float64 [N, K] (global scale left out)."""
    blocks, units = -(-rows // BLOCK_ROWS), -(-columns // UNIT_COLUMNS)
    resident = by_blocks(resident, blocks, units)
    words = np.ascontiguousarray(resident[..., :1024]).view(np.uint32).reshape(blocks, units, 2, 8, 4, 4)
    scales = resident[..., 1024:].reshape(blocks, units, 8, 4, 2, 2).transpose(0, 1, 4, 2, 3, 5)
    codes = decode_word(words).view(ml_dtypes.bfloat16)  # [block, unit, half, g, t, j, place, 2]
    factors = decode_scale(scales).view(ml_dtypes.bfloat16)  # [block, unit, half, g, t, lower]
    matrix = np.empty((blocks, 2, 8, units, 2, 4, 4, 2, 2))
    for place in range(4):
        lower, pair = place % 2, place // 2
        product = codes[..., place, :].astype(np.float64) * factors[..., None, None, lower].astype(np.float64)
        rounded = product.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        matrix[:, lower, :, :, :, :, :, pair] = rounded.transpose(0, 3, 1, 2, 4, 5, 6)
    rows_in_order = matrix_rows(matrix.reshape(blocks * BLOCK_ROWS, units * UNIT_COLUMNS))
    return rows_in_order[:rows, :columns] * 2.0**20


def pack_fp8(weight: np.ndarray) -> np.ndarray:
    """Resident bytes of E4M3 weights [N, K]."""
    rows, columns = weight.shape
    blocks, units = -(-rows // BLOCK_ROWS), -(-columns // UNIT_COLUMNS)
    padded = np.zeros((blocks * BLOCK_ROWS, units * UNIT_COLUMNS), np.uint8)
    padded[:rows, :columns] = weight
    # [block, lower, g, unit, half, t, j // 2, j % 2, pair, 2] to
    # [block, unit, half, j // 2, g, t, j % 2, pair, 2, upper]: the upper row is the high byte of a half word
    tiles = fragment_rows(padded).reshape(blocks, 2, 8, units, 2, 4, 2, 2, 2, 2)[:, ::-1]
    return by_groups(tiles.transpose(0, 3, 4, 6, 2, 5, 7, 8, 9, 1).reshape(blocks, units, 2048))


# -- attention ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sequences:
    """Sequences of a step: how many tokens each has in the cache at its end, how many of them are new."""

    lengths: list[int]
    queries: list[int]
    block_size: int

    def batch(self, rng: np.random.Generator, num_blocks: int, columns: int) -> StepBatch:
        """Inputs with blocks dealt out at random."""
        order = rng.permutation(num_blocks).astype(np.int32)
        tables = np.full((len(self.lengths), columns), -1, np.int32)
        positions, slots, used = [], [], 0
        for index, (length, query) in enumerate(zip(self.lengths, self.queries, strict=True)):
            count = -(-length // self.block_size)
            tables[index, :count] = order[used : used + count]
            used += count
            at = np.arange(length - query, length)
            positions.append(at)
            slots.append(
                tables[index, at // self.block_size].astype(np.int64) * self.block_size + at % self.block_size
            )
        tokens = sum(self.queries)
        return StepBatch(
            token_ids=rng.integers(0, 100, tokens).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            slot_mapping=np.concatenate(slots),
            query_start=np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32),
            seq_lens=np.array(self.lengths, np.int32),
            block_tables=tables,
            logits_rows=(np.cumsum(self.queries) - 1).astype(np.int32),
        )


def attention(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    batch: StepBatch,
    *,
    scale: float,
    window: int | None,
) -> np.ndarray:
    """float64 [T, heads, D] of query [T, heads, D] over caches [blocks, block_size, kv_heads, D]."""
    block_size, kv_heads = keys.shape[1:3]
    group = query.shape[1] // kv_heads
    out = np.empty(query.shape)
    for index, length in enumerate(batch.seq_lens):
        begin, end = batch.query_start[index : index + 2]
        table = batch.block_tables[index, : -(-length // block_size)]
        k = keys[table].reshape(-1, *keys.shape[2:])[:length].repeat(group, axis=1)
        v = values[table].reshape(-1, *values.shape[2:])[:length].repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", query[begin:end], k) * scale
        at = np.arange(length - (end - begin), length)[:, None]
        visible = np.arange(length) <= at
        if window is not None:
            visible &= np.arange(length) > at - window
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[begin:end] = np.einsum("hqk,khd->qhd", weights, v)
    return out


def rotate(x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, magnitude: float) -> np.ndarray:
    """Rotate-half RoPE of x [T, heads, D] in float64, angles rounded to float32 as models do."""
    angles = (positions.astype(np.float32)[:, None] * inv_freq.astype(np.float32)).astype(np.float64)[:, None]
    cosine, sine = np.cos(angles) * magnitude, np.sin(angles) * magnitude
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def stored_values(layer: KVLayer, carrier: np.ndarray, scale: float) -> np.ndarray:
    """A cache's carrier as the values that attention must see."""
    if carrier.dtype == np.uint8:
        return from_e4m3(carrier) * np.float32(scale)
    return from_bf16(carrier) if carrier.dtype == np.uint16 else carrier.astype(np.float64)
