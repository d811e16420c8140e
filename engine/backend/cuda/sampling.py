"""Sampling: on the device where it can, on the host for rows that want more than a token."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np

from engine.backend.cuda.device import CudaDevice
from engine.backend.cuda.staging import PinnedBuffer
from engine.backend.cuda.tensor import CudaTensor, address_of
from engine.backend.protocol import Tensor
from engine.sampler import PendingTokens, SampledTokens, SamplingRow, sample

_THREADS = 1024
_PACK = struct.Struct("=QQfffiii")
"""`Row` of kernels/sampling.cu: key, position, 1 / temperature, top-p, min-p, top-k, index, greedy"""
_LARGEST_VOCABULARY = 1 << 19
"""The kernel's fixed-point sums hold that many tokens."""
_LARGEST_INVERSE_TEMPERATURE = 1e30
"""Beyond, a logit difference of zero times infinity would not be a number."""


def row_bytes(max_rows: int) -> int:
    """Bytes of parameters and of results for `max_rows` rows."""
    return max_rows * (_PACK.size + 4)


def on_device(row: SamplingRow) -> bool:
    """The row wants nothing but a token, chosen from the logits as they are."""
    return not row.adjusts_logits and row.num_logprobs is None and row.target_token_id is None


class _DeviceTokens:
    """What the sampling kernel chooses. A `PendingTokens`."""

    def __init__(self, wait: Callable[[], SampledTokens]) -> None:
        self.wait = wait


class SamplingOperation:
    """Chooses tokens."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._io: CudaTensor | None = None
        self._pinned: PinnedBuffer | None = None
        self._max_rows = 0

    def reserve(self, io: CudaTensor, pinned: PinnedBuffer, max_rows: int) -> None:
        """`row_bytes` of memory on the device, and as much pinned on the host."""
        self._io, self._pinned, self._max_rows = io, pinned, max_rows

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> PendingTokens:
        if logits.shape[0] != len(rows):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} rows to sample")
        fits = logits.shape[1] <= _LARGEST_VOCABULARY
        device_rows = [index for index, row in enumerate(rows) if fits and on_device(row)]
        results = self._choose(logits, rows, device_rows)
        return _DeviceTokens(lambda: self._wait(logits, rows, device_rows, results))

    def _choose(self, logits: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> np.ndarray:
        """int32, where the tokens of the rows `indices` will be."""
        count = len(indices)
        if count == 0:
            return np.empty(0, np.int32)
        assert self._io, "reserve() comes before sample()"
        assert self._pinned
        assert count <= self._max_rows, f"{count} rows, {self._max_rows} were reserved"
        size = count * _PACK.size
        pack_rows(rows, indices, out=self._pinned.array[:size].data)
        results = self._max_rows * _PACK.size
        self._device.copy_to_device(self._io.address, self._pinned.address, size)
        self._device.launch(
            self._device.kernel("sampling", "sample_rows"),
            (count,),
            _THREADS,
            address_of(logits),
            self._io.address,
            logits.shape[1],
            self._io.address + results,
        )
        self._device.copy_to_host(self._pinned.address + results, self._io.address + results, count * 4)
        return self._pinned.array[results : results + count * 4].view(np.int32)

    def _wait(
        self, logits: Tensor, rows: Sequence[SamplingRow], device_rows: list[int], results: np.ndarray
    ) -> SampledTokens:
        self._device.synchronize()
        if len(device_rows) == len(rows):
            return SampledTokens(results.copy(), [None] * len(rows))
        tokens = SampledTokens(np.empty(len(rows), np.int32), [None] * len(rows))
        tokens.token_ids[device_rows] = results
        others = sorted(set(range(len(rows))) - set(device_rows))
        host = sample(self._rows_on_host(logits, others), [rows[index] for index in others])
        for place, index in enumerate(others):
            tokens.token_ids[index] = host.token_ids[place]
            tokens.logprobs[index] = host.logprobs[place]
        return tokens

    def _rows_on_host(self, logits: Tensor, indices: list[int]) -> np.ndarray:
        vocabulary = logits.shape[1]
        result = np.empty((len(indices), vocabulary), np.float32)
        for place, index in enumerate(indices):
            row = result[place]
            self._device.copy_to_host(
                row.ctypes.data, address_of(logits) + index * vocabulary * 4, vocabulary * 4
            )
        self._device.synchronize()
        return result


def pack_rows(rows: Sequence[SamplingRow], indices: Sequence[int], *, out: memoryview) -> None:
    """The kernel's parameters, `Row` [indices], of the rows `indices`, into writable bytes."""
    pack, offset = _PACK.pack_into, 0
    for index in indices:
        row = rows[index]
        params = row.params
        temperature = params.temperature
        inverse = min(1.0 / temperature, _LARGEST_INVERSE_TEMPERATURE) if temperature else 0.0
        top_k, greedy = max(params.top_k, 0), not temperature
        pack(
            out,
            offset,
            row.key,
            row.position,
            inverse,
            params.top_p,
            params.min_p,
            top_k,
            index,
            greedy,
        )
        offset += _PACK.size
