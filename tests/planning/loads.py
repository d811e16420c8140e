"""Loads, real and planned, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.devices import Device, choose_device
from engine.memory.errors import AllocationError
from engine.memory.record import EventKind, EventState
from engine.memory.settings import TraceSettings
from engine.model.checkpoint import Checkpoint
from engine.residency import Residency

MIB = 1 << 20
TRACE = TraceSettings(trace=True, records=1 << 14)

Request = tuple[EventKind, EventState, int, int, str, str, int]


class Run:
    """A load: every request in order, and what was live in the end."""

    def __init__(self, config: EngineConfig, device: Device, checkpoint: Checkpoint) -> None:
        residency = Residency(config, device, checkpoint, trace=TRACE)
        house = residency.open_house()
        assert house.tracing is not None
        self.error: AllocationError | None = None
        resident = None
        try:
            resident = residency.fill()
        except AllocationError as error:
            self.error = error
        self.requests = _requests(house)
        self.live = house.tracing.live_by_tag()
        self.ledger = house.ledger()
        self.blocks = 0 if residency.kv_plan is None else residency.kv_plan.num_blocks
        if self.error is not None:
            self.error.__traceback__ = None
        del resident
        residency.close()


def _requests(house: Any) -> list[Request]:
    with house.recorder.reader() as reader:
        return [
            (event.kind, event.state, event.sequence, event.size, event.tag, event.site, event.live)
            for event in reader.read().events()
        ]


def flags_of(model: Path | str, **flags: Any) -> EngineConfig:
    return EngineConfig.from_flags(
        model=str(model), **{"device": "cpu", "threads": 1, "device_memory": 256 * MIB, **flags}
    )


def load(config: EngineConfig) -> Run:
    """The real load."""
    return Run(config, choose_device(config, {}), Checkpoint.open(config.model))
