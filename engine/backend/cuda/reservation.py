"""What steps ask device memory for beside weights, caches and activations, in which order and under which
tags: for the backend, and for plans of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.backend.cuda.attention import BLOCK_SIZE_MULTIPLE
from engine.backend.cuda.attention import partial_bytes as attention_bytes
from engine.backend.cuda.inputs import io_bytes
from engine.backend.cuda.layout import DeviceShape, units
from engine.backend.cuda.products import (
    MOST_SPLIT_TILES,
    Family,
    arranged_bytes,
    families_of,
    partial_bytes,
)
from engine.backend.cuda.sampling import row_bytes
from engine.backend.protocol import LinearSource, StepLimits
from engine.errors import ConfigurationError

__all__ = ["ArrangedActivations", "StepMemory", "reserve_step"]

T = TypeVar("T")
Reserve = Callable[[str, int], T]
"""Allocates so many bytes under a tag"""

_ARRANGED_BYTES = 64 << 20
"""Arranged activations of more tokens than this holds are made and used in turns."""


class ArrangedActivations:
    """How much room activations need that are arranged for the kernels of some layers."""

    def __init__(self, shape: DeviceShape) -> None:
        self._hopper = shape.hopper
        self._widest = 0
        """columns of the widest layer whose activations are arranged"""

    def add(self, parts: Iterable[LinearSource]) -> None:
        """These layers were loaded."""
        for part in parts:
            columns = part.shape[1]
            if Family.HOPPER in families_of(part.format, columns, hopper=self._hopper):
                self._widest = max(self._widest, columns)

    def nbytes(self, max_tokens: int) -> int:
        """For steps of up to `max_tokens` tokens; 0 if no layer needs it."""
        if not self._widest:
            return 0
        return arranged_bytes(self.tokens_at_once(max_tokens, self._widest), self._widest)

    @staticmethod
    def tokens_at_once(tokens: int, columns: int) -> int:
        """Tokens whose arranged activations fit, in whole tiles."""
        most = _ARRANGED_BYTES // (units(columns) * 256) // 128 * 128
        return min(tokens, max(most, 128))


@dataclass(frozen=True, slots=True)
class StepMemory(Generic[T]):
    """What `reserve_step` allocated."""

    linear_partials: T
    linear_arrived: T
    """must be zero at first, and is zero after every product"""
    linear_arranged: T | None
    attention_partials: T
    attention_states: T
    sampling: T
    io: T


def reserve_step(
    limits: StepLimits, shape: DeviceShape, arranged: ArrangedActivations, reserve: Reserve[T]
) -> StepMemory[T]:
    """Allocate io buffers and kernel scratch for steps up to `limits`.

    Raises
    ------
    ConfigurationError
        The cache's block size is none that the kernels read.
    """
    if limits.block_size % BLOCK_SIZE_MULTIPLE:
        raise ConfigurationError(
            f"--block-size {limits.block_size}: the CUDA backend needs a multiple of {BLOCK_SIZE_MULTIPLE}"
        )
    partials = partial_bytes(shape.shared_bytes, shape.multiprocessors, hopper=shape.hopper)
    arranged_size = arranged.nbytes(limits.max_tokens)
    attention_out, attention_states = attention_bytes(shape.multiprocessors)
    return StepMemory(
        linear_partials=reserve("workspace/linear.partials", partials),
        linear_arrived=reserve("workspace/linear.arrived", MOST_SPLIT_TILES * 4),
        linear_arranged=reserve("workspace/linear.arranged", arranged_size) if arranged_size else None,
        attention_partials=reserve("workspace/attention.partials", attention_out),
        attention_states=reserve("workspace/attention.states", attention_states),
        sampling=reserve("io/sampling", row_bytes(limits.max_logits_rows)),
        io=reserve("io/step", io_bytes(limits)),
    )
