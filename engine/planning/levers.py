"""Levers that were tried: each by planning the load again with its value, the gentlest value that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.backend.protocol import DType
from engine.config import EngineConfig, flag_name
from engine.errors import ConfigurationError
from engine.levers import Lever, format_size
from engine.memory.errors import Why
from engine.planning.plan import LoadPlan, Planner

__all__ = ["find_combination", "plan_levers"]

_TOKENS_STEP = 8
_FEWEST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Scale:
    """A flag's values, from the gentlest to the harshest: more of it never fits less."""

    field: str
    count: int
    value: Callable[[int], tuple[Any, str]]
    """the field's value at an index, and its text on the command line"""


class _Trials:
    """Tries values of flags on one load that does not fit."""

    def __init__(self, planner: Planner, config: EngineConfig, plan: LoadPlan) -> None:
        self._planner = planner
        self._config = config
        self._plan = plan
        assert plan.failure is not None
        self._is_unmapped = plan.failure.request["why"] == Why.ADDRESS_SPACE.value
        """the device has the bytes: more of it, or a larger share, is no help"""

    def levers(self) -> Iterator[Lever]:
        for scale in self._scales():
            if scale.count == 0:
                continue
            index = self.gentlest(scale)
            with suppress(ConfigurationError):  # even the harshest contradicts another flag
                if index is not None:
                    yield self._lever(scale, index, is_enough=True)
                else:
                    yield self._lever(scale, scale.count - 1, is_enough=False)

    def _fits(self, field: str, value: Any) -> bool:
        try:
            planner, config = self._changed({field: value})
            return planner.fits(config)
        except ConfigurationError:
            return False

    def gentlest(self, scale: _Scale) -> int | None:
        """The first index that fits, by bisection; None if the last does not."""
        if not self._fits(scale.field, scale.value(scale.count - 1)[0]):
            return None
        low, high = 0, scale.count - 1
        while low < high:
            middle = (low + high) // 2
            if self._fits(scale.field, scale.value(middle)[0]):
                high = middle
            else:
                low = middle + 1
        return low

    def _lever(self, scale: _Scale, index: int, *, is_enough: bool) -> Lever:
        value, text = scale.value(index)
        return Lever(
            flag=flag_name(scale.field),
            value=text,
            frees=self._frees({scale.field: value}),
            enough=is_enough,
            verified=is_enough,
        )

    def _frees(self, fields: dict[str, Any]) -> int:
        """What is needed less, and may be used more."""
        planner, config = self._changed(fields)
        if self._is_unmapped:
            return self._planner.mapped(self._config) - planner.mapped(config)
        capacity = planner.device.capacity
        room = capacity if config.kv_cache_memory else int(config.gpu_memory_utilization * capacity)
        had = self._plan.capacity if self._plan.limit is None else self._plan.limit
        return room - had + self._plan.resident - planner.need(config)

    def _changed(self, fields: dict[str, Any]) -> tuple[Planner, EngineConfig]:
        """The load with other flags. Raises ConfigurationError if they cannot be used together."""
        planner = self._planner
        if (capacity := fields.get("device_memory")) is not None:
            planner = planner.on(planner.device.of_capacity(capacity))
        return planner, msgspec.structs.replace(self._config, **fields)

    # -- the flags -----------------------------------------------------------------------------------------

    def _scales(self) -> Iterator[_Scale]:
        if not self._is_unmapped:
            yield from self._more_device()
        yield from self._less_kv()
        yield from self._smaller_steps()

    def _more_device(self) -> Iterator[_Scale]:
        plan, config = self._plan, self._config
        if plan.limit is not None:
            first = math.floor(config.gpu_memory_utilization * 100) + 1
            shares = [percent / 100 for percent in range(first, 101)]
            texts = [(share, f"{share:g}") for share in shares]
            yield _Scale("gpu_memory_utilization", len(texts), texts.__getitem__)
        if plan.device == "cpu":
            share = config.gpu_memory_utilization if plan.limit is not None else 1.0
            most = math.ceil(max(plan.resident, plan.peak.bytes if plan.peak else 0) / share)
            yield _sizes("device_memory", plan.capacity + 1, 2 * max(most, plan.capacity), up=True)

    def _less_kv(self) -> Iterator[_Scale]:
        plan, config = self._plan, self._config
        given = config.kv_cache_memory
        kv_cache = self._planner.kv_cache_of(config)
        # A length that was asked for is kept or refused, never shortened.
        least = -(-kv_cache.longest_sequence // kv_cache.block_size) if config.max_model_len else 1
        most = (given or plan.capacity) - 1
        yield _sizes("kv_cache_memory", least * kv_cache.block_bytes, most, up=False)
        if given is None:
            blocks = -(-kv_cache.longest_sequence // kv_cache.block_size)
            yield _lengths(kv_cache.block_size, blocks - 1)
            if kv_cache.dtype != DType.FLOAT8_E4M3.label:
                yield _Scale("kv_cache_dtype", 1, lambda index: ("fp8", "fp8"))

    def _smaller_steps(self) -> Iterator[_Scale]:
        plan = self._plan
        tokens, seqs = plan.max_num_batched_tokens, plan.max_num_seqs
        # Fewer tokens than rows of logits would make those fewer, too: they have a flag of their own.
        rows = min(self._config.max_logits_rows or 0, tokens)
        least = max(seqs, rows, _FEWEST_TOKENS)
        count = -(-(tokens - least) // _TOKENS_STEP)
        if count > 0:

            def fewer(index: int) -> tuple[int, str]:
                value = least + (count - 1 - index) * _TOKENS_STEP
                return value, str(value)

            yield _Scale("max_num_batched_tokens", count, fewer)
        if rows > seqs:
            yield _Scale(
                "max_logits_rows", rows - seqs, lambda index: (rows - 1 - index, str(rows - 1 - index))
            )
        if seqs > 1:
            yield _Scale("max_num_seqs", seqs - 1, lambda index: (seqs - 1 - index, str(seqs - 1 - index)))


def plan_levers(planner: Planner, config: EngineConfig, plan: LoadPlan) -> list[Lever]:
    """Levers against `plan`, which does not fit: those that are enough first, then by the bytes they free.

    Of each flag the gentlest value that fits alone; where none does, the harshest, if that frees anything.
    """
    found = [lever for lever in _Trials(planner, config, plan).levers() if lever.enough or lever.frees > 0]
    return sorted(found, key=lambda lever: (not lever.enough, -lever.frees))


def find_combination(planner: Planner, config: EngineConfig, plan: LoadPlan) -> str | None:
    """Flags that fit together, where none does alone: smaller steps and shorter sequences, halved in turn.

    None if even the smallest do not: the weights are too large for the device.
    """
    kv_cache = planner.kv_cache_of(config)
    for halving in range(1, max(plan.max_num_batched_tokens, plan.max_num_seqs).bit_length()):
        seqs = max(plan.max_num_seqs >> halving, 1)
        tokens = max(plan.max_num_batched_tokens >> halving, seqs, _FEWEST_TOKENS)
        fields: dict[str, Any] = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
        if config.max_logits_rows is not None:
            fields["max_logits_rows"] = max(min(config.max_logits_rows >> halving, tokens), seqs)
        if kv_cache.dtype != DType.FLOAT8_E4M3.label:
            fields["kv_cache_dtype"] = "fp8"
        trials = _Trials(planner, msgspec.structs.replace(config, **fields), plan)
        if config.kv_cache_memory is None:
            scale = _lengths(kv_cache.block_size, -(-kv_cache.longest_sequence // kv_cache.block_size))
        else:
            scale = _sizes("kv_cache_memory", kv_cache.block_bytes, config.kv_cache_memory, up=False)
        index = trials.gentlest(scale)
        if index is not None:
            text = " ".join(f"{flag_name(name)} {value}" for name, value in fields.items())
            return f"{text} {flag_name(scale.field)} {scale.value(index)[1]}"
    return None


def _lengths(step: int, blocks: int) -> _Scale:
    """`max_model_len` of `blocks` blocks and fewer."""
    return _Scale(
        "max_model_len", blocks, lambda index: ((blocks - index) * step, str((blocks - index) * step))
    )


def _sizes(field: str, low: int, high: int, *, up: bool) -> _Scale:
    """Sizes from `low` to `high` bytes in three digits, rising or falling."""
    sizes: list[tuple[int, str]] = []
    size, text = format_size(low, up=True)
    while size <= high:
        sizes.append((size, text))
        size, text = format_size(size + 1, up=True)
    if not up:
        sizes.reverse()
    return _Scale(field, len(sizes), sizes.__getitem__)
