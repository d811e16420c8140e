"""Plans of a load: the loader and the engine's construction, run over a device without memory.

What a plan says is what the load will do, for it is the same code: sizes, tags, order, lines of code. Only
the checkpoint's headers are read.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.backend.protocol import DType
from engine.config import EngineConfig, EngineLimits
from engine.failure_record import allocation_record, failed_line
from engine.kv_sizing import least_blocks
from engine.levers import Lever
from engine.memory.errors import AllocationError, AllocationRequest
from engine.memory.house import MemoryHouse
from engine.memory.ledger import Ledger
from engine.memory.record import EventKind, EventState, TraceEvent
from engine.memory.settings import TraceSettings
from engine.model.headers import CheckpointHeaders
from engine.planning.device import PlanningDevice
from engine.planning.wide import WideTensors, find_wide_tensors
from engine.residency import Residency

__all__ = ["KVCachePlan", "LoadPlan", "Peak", "PlannedFailure", "Planner"]

_UNLIMITED = 1 << 60


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The most that is live at one moment, and the request that made it so."""

    bytes: int
    sequence: int
    """``#N`` of the request"""
    size: int
    tag: str
    site: str
    over_resident: int
    """bytes of it that are given back again"""


class KVCachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache, and what fits in it."""

    dtype: str
    block_size: int
    """tokens"""
    block_bytes: int
    """in all layers"""
    num_blocks: int
    tokens: int
    bytes: int
    longest_sequence: int
    """tokens: `max_model_len`, which the cache holds at least once"""

    def sequences_at(self, length: int) -> int:
        """How many sequences of `length` tokens fit at once."""
        return self.num_blocks // -(-length // self.block_size)


class PlannedFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The first request that would fail."""

    request: dict[str, Any]
    """as in a failure record"""
    line: str
    """as a trace would print it, marked as planned"""
    what: str


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a load would do. Sizes are bytes."""

    model: str
    device: str
    """``cpu``, ``cuda``"""
    description: str
    """the device for a person"""
    capacity: int
    limit: int | None
    """most that may be live, by `gpu_memory_utilization`; None: all of the capacity"""
    fits: bool
    requests: int
    """to the memory resource, the failed one included"""
    ledger: dict[str, Any]
    """after the load, or at the failure"""
    resident: int
    """what stays: all of it, also where it does not fit"""
    needed: dict[str, int]
    """of that by segment; with the smallest KV cache that these flags allow, where it does not fit"""
    load_peak: Peak | None
    """while weights are loaded; None: not even the first weight fits"""
    peak: Peak | None
    kv_cache: KVCachePlan | None
    """None: it fails before the cache is sized"""
    max_num_seqs: int
    max_num_batched_tokens: int
    wide: WideTensors
    failure: PlannedFailure | None = None
    levers: list[Lever] = []
    combination: str | None = None
    """flags that fit together, where none does alone"""
    estimates: list[str] = []
    """what of this is estimated, for a person"""

    @property
    def tags(self) -> dict[str, int]:
        """Bytes by full tag, after the load or at the failure."""
        tags: dict[str, int] = self.ledger["tags"]
        return tags


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One run over a planning device."""

    ledger: Ledger
    events: list[TraceEvent]
    limits: EngineLimits
    limit: int | None
    kv_cache: KVCachePlan | None
    failure: AllocationRequest | None


class Planner:
    """Plans loads of one checkpoint on one device.

    Parameters
    ----------
    headers
        The checkpoint's.
    device
        What the plans are for.
    """

    def __init__(self, headers: CheckpointHeaders, device: PlanningDevice) -> None:
        self.headers = headers
        self.device = device

    def plan(self, config: EngineConfig) -> LoadPlan:
        """The load of `config`, without levers.

        Raises
        ------
        ConfigurationError, CheckpointError
            A flag or the checkpoint cannot be used.
        """
        outcome = self._run(config, self.device)
        events = outcome.events
        kv_cache, failure = outcome.kv_cache, outcome.failure
        needed = outcome.ledger.segments
        if failure is not None:
            # Scratch is not needed for good: what was live of it at the failure is no part of this.
            needed = self._needed(config)
        return LoadPlan(
            model=config.model,
            device=self.device.name,
            description=self.device.description,
            capacity=self.device.capacity,
            limit=outcome.limit,
            fits=failure is None,
            requests=sum(event.kind is EventKind.ALLOC for event in events),
            ledger=outcome.ledger.to_dict(),
            resident=sum(needed.values()),
            needed=needed,
            load_peak=_peak(events, ("weights", "repack")),
            peak=_peak(events),
            kv_cache=kv_cache,
            max_num_seqs=outcome.limits.max_num_seqs,
            max_num_batched_tokens=outcome.limits.max_num_batched_tokens,
            wide=find_wide_tensors(self.headers),
            failure=None if failure is None else self._describe(failure, config),
            estimates=[] if self.device.name == "cpu" else [_CUDA_ESTIMATES],
        )

    def fits(self, config: EngineConfig) -> bool:
        """Whether the load of `config` succeeds. Raises as `plan` does."""
        residency = self._open(config, self.device, TraceSettings())
        try:
            residency.open_house()
            residency.fill()
        except AllocationError as error:
            _let_go(error)
            return False
        finally:
            residency.close()
        return True

    def need(self, config: EngineConfig) -> int:
        """Bytes that stay after the load of `config`, with the smallest KV cache that it allows."""
        return sum(self._needed(config).values())

    def mapped(self, config: EngineConfig) -> int:
        """Bytes that are live after the load of `config`, or at its failure, where the system maps all."""
        return sum(self._run(config, self.device.of_mappable(None)).ledger.segments.values())

    def kv_cache_of(self, config: EngineConfig) -> KVCachePlan:
        """The smallest KV cache that `config` allows."""
        residency = self._open(config, self.device, TraceSettings())
        limits, block_bytes = residency.limits, residency.block_bytes
        blocks = least_blocks(config, limits, block_bytes)
        return _describe_cache(residency.kv_dtype, limits, block_bytes, blocks)

    def on(self, device: PlanningDevice) -> Planner:
        """Plans of the same checkpoint on another device."""
        return Planner(self.headers, device)

    def _open(self, config: EngineConfig, device: PlanningDevice, trace: TraceSettings) -> Residency:
        return Residency(config, device, self.headers, trace=trace)

    def _run(self, config: EngineConfig, device: PlanningDevice) -> _Outcome:
        # A tensor takes two requests and two frees at most; steps and the KV cache ask for as many again.
        records = 4 * len(self.headers.tensors) + 4096
        residency = self._open(config, device, TraceSettings(trace=True, records=records))
        try:
            house = residency.open_house()
            resident = residency.fill()
            outcome = _outcome(residency, house, None)
            del resident  # the weights, which the ledger is to hold
            return outcome
        except AllocationError as error:
            outcome = _outcome(residency, house, error.request)
            _let_go(error)
            return outcome
        finally:
            residency.close()

    def _needed(self, config: EngineConfig) -> dict[str, int]:
        """Bytes by segment that stay after the load on a device that has room, with the least KV cache."""
        device = self.device.of_capacity(_UNLIMITED).of_mappable(None)
        least = self.kv_cache_of(config)
        outcome = self._run(msgspec.structs.replace(config, kv_cache_memory=least.bytes), device)
        assert outcome.failure is None, "nothing fails where there is room for everything"
        return outcome.ledger.segments

    def _describe(self, request: AllocationRequest, config: EngineConfig) -> PlannedFailure:
        return PlannedFailure(
            request=allocation_record(request),
            line=f"{failed_line(request, self.device.memory_name)} planned=yes",
            what=f"{config.model}: {str(AllocationError(request)).replace(' failed: ', ' would fail: ', 1)}",
        )


_CUDA_ESTIMATES = (
    "the context's bytes, and what the driver's steps of 2 MiB add: both differ a little from card to card"
)


def _outcome(residency: Residency, house: MemoryHouse, failure: AllocationRequest | None) -> _Outcome:
    return _Outcome(
        house.ledger("planned"),
        _events(house),
        residency.limits,
        None if house.limiting is None else house.limiting.limit,
        _kv_cache(residency),
        failure,
    )


def _let_go(error: AllocationError) -> None:
    """Drop what the frames hold that `error` went through: a half-built model."""
    traceback.clear_frames(error.__traceback__)


def _events(house: MemoryHouse) -> list[TraceEvent]:
    assert house.recorder is not None
    with house.recorder.reader() as reader:
        piece = reader.read()
        assert piece.dropped == 0, "the recorder holds the whole load"
        events = list(piece.events())
    failed = [index for index, event in enumerate(events) if event.state is EventState.FAILED]
    return events[: failed[0] + 1] if failed else events  # what follows is the teardown


def _kv_cache(residency: Residency) -> KVCachePlan | None:
    plan = residency.kv_plan
    if plan is None:
        return None
    return _describe_cache(residency.kv_dtype, plan.limits, residency.block_bytes, plan.num_blocks)


def _describe_cache(dtype: DType, limits: EngineLimits, block_bytes: int, blocks: int) -> KVCachePlan:
    return KVCachePlan(
        dtype=dtype.label,
        block_size=limits.block_size,
        block_bytes=block_bytes,
        num_blocks=blocks,
        tokens=blocks * limits.block_size,
        bytes=blocks * block_bytes,
        longest_sequence=limits.max_model_len,
    )


def _peak(events: Sequence[TraceEvent], segments: tuple[str, ...] = ()) -> Peak | None:
    """Where most was live, among requests under `segments`; all, if none are named."""
    made = [
        event
        for event in events
        if event.state is EventState.OK and (not segments or event.tag.partition("/")[0] in segments)
    ]
    allocations = [event for event in made if event.kind is EventKind.ALLOC]
    if not allocations:
        return None
    highest = max(allocations, key=lambda event: event.live)
    return Peak(
        bytes=highest.live,
        sequence=highest.sequence,
        size=highest.size,
        tag=highest.tag,
        site=highest.site,
        over_resident=highest.live - made[-1].live,
    )
