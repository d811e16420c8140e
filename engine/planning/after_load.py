"""Plans beside a real load: how far they agree, and levers for one that failed."""

from __future__ import annotations

import logging

import msgspec

from engine.config import EngineConfig
from engine.failure import summarize_error
from engine.levers import Lever, more_address_space
from engine.memory.address_space import AddressSpace
from engine.memory.errors import AllocationRequest, Why
from engine.memory.house import MemoryHouse
from engine.model.headers import CheckpointHeaders
from engine.planning.device import PlanningDevice, choose_planning_device
from engine.planning.levers import plan_levers
from engine.planning.plan import Planner
from engine.residency import Residency

_log = logging.getLogger(__name__)

__all__ = ["TagDifference", "compare_with_plan", "difference_lines", "levers_after"]


class TagDifference(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan and a load say of one tag. Sizes are bytes."""

    tag: str
    planned: int
    actual: int

    @property
    def difference(self) -> int:
        """Signed: more than 0 where the load took more than planned."""
        return self.actual - self.planned


def compare_with_plan(residency: Residency, house: MemoryHouse) -> list[TagDifference]:
    """What was planned and what is live, by tag, once it is loaded; nothing where nobody counts tags."""
    watcher = house.tracing or house.statistics
    if watcher is None:
        return []
    actual = watcher.live_by_tag()
    planned = _planner(residency).plan(residency.config).tags
    return [
        TagDifference(tag=tag, planned=planned.get(tag, 0), actual=actual.get(tag, 0))
        for tag in dict.fromkeys([*planned, *actual])
    ]


def difference_lines(differences: list[TagDifference]) -> list[str]:
    """Planned bytes, actual bytes and the difference, by the tags' first segments; then tags that differ."""
    segments: dict[str, list[int]] = {}
    for entry in differences:
        sums = segments.setdefault(entry.tag.partition("/")[0], [0, 0])
        sums[0] += entry.planned
        sums[1] += entry.actual
    lines = [
        f"plan against actual: {name} {planned:,} {actual:,} {actual - planned:+,}"
        for name, (planned, actual) in segments.items()
    ]
    lines += [
        f"plan against actual: {entry.tag} {entry.planned:,} {entry.actual:,} {entry.difference:+,}"
        for entry in differences
        if entry.difference
    ]
    return lines


def levers_after(residency: Residency, request: AllocationRequest) -> list[Lever]:
    """Levers against the failure of `request`: found by planning if a plan fails likewise, else computed.

    It does not where memory was lost to something that a plan knows nothing of.
    """
    try:
        levers = _planned_levers(residency, request)
    except Exception as error:
        _log.warning("no levers could be planned: %s", summarize_error(error))
        levers = []
    return levers or residency.estimate_levers(request)


def _planned_levers(residency: Residency, request: AllocationRequest) -> list[Lever]:
    planner = _planner(residency, request)
    plan = planner.plan(residency.config)
    if plan.failure is None or plan.failure.request["tag"] != request.tag:
        return []
    levers = plan_levers(planner, residency.config, plan)
    if request.why is Why.ADDRESS_SPACE:
        levers = [*_system_levers(planner, residency.config, request), *levers]
    return levers if any(lever.enough for lever in levers) else []


def _system_levers(planner: Planner, config: EngineConfig, request: AllocationRequest) -> list[Lever]:
    """What tells the system to map all that the load takes, where all of it is planned to fit then."""
    unbounded = planner.on(planner.device.of_mappable(None))
    lacking = planner.mapped(config) - (request.live or 0) - AddressSpace.read().left(request.size)
    is_enough = unbounded.fits(config)
    found = more_address_space(AddressSpace.read(), lacking)
    return [msgspec.structs.replace(lever, enough=is_enough, verified=is_enough) for lever in found]


def _planner(residency: Residency, request: AllocationRequest | None = None) -> Planner:
    return Planner(CheckpointHeaders.of(residency.checkpoint), _device_of(residency, request))


def _device_of(residency: Residency, request: AllocationRequest | None) -> PlanningDevice:
    """A device like the one that `residency` is on, with as much room as `request` found."""
    config = msgspec.structs.replace(residency.config, device=residency.device.name)
    device, total = choose_planning_device(config), residency.total
    taken = device.taken
    if request is not None and request.free is not None and request.live is not None and taken:
        taken = max(total - request.free - request.live, 0)
    device = device.of_capacity(total, taken=taken)
    if request is not None and request.why is Why.ADDRESS_SPACE:
        device = device.of_mappable((request.live or 0) + AddressSpace.read().left(request.size))
    return device
