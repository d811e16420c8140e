"""Which flag to turn to which value when memory runs out, and how many bytes that frees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from engine.backend.protocol import DType
from engine.config import EngineConfig, EngineLimits
from engine.memory.address_space import AddressSpace
from engine.memory.errors import AllocationRequest, Why

__all__ = [
    "Lever",
    "MemoryDemand",
    "describe_levers",
    "find_levers",
    "format_size",
    "more_address_space",
]


class Lever(msgspec.Struct, frozen=True, kw_only=True):
    """A flag, the value to give it, and what that does."""

    flag: str
    """``--kv-cache-memory``; or a command that is the system's: ``ulimit -v``"""
    value: str
    """as the command line reads it: ``1.2GiB``, ``8``, ``fp8``; KiB of ``ulimit``"""
    frees: int
    """bytes that the engine then needs less, or may use more"""
    enough: bool
    """this lever alone should do; else it takes others too"""
    verified: bool = False
    """a load with this value was planned, and fits; else it is computed"""

    def __str__(self) -> str:
        return f"{self.flag} {self.value}"


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """What an engine needs of its device, computed, not measured. Sizes are bytes."""

    config: EngineConfig
    limits: EngineLimits
    device: str
    total: int
    """the device has, or the resource that was handed in may take of it"""
    limit: int | None
    """most that may be live (`gpu_memory_utilization`); None: all of it"""
    weights: int
    """the checkpoint's tensors"""
    scratch: int
    """the largest tensor's, for it is repacked beside itself"""
    workspace: Callable[[EngineLimits], int]
    """activations and logits of the largest step"""
    kv_block: int
    """a block of the KV cache in all layers"""
    kv_blocks: int
    """blocks that are, or will be, allocated"""
    kv_dtype: DType

    @property
    def kv(self) -> int:
        return self.kv_blocks * self.kv_block

    @property
    def resident(self) -> int:
        """What stays for as long as the engine runs."""
        return self.weights + self.workspace(self.limits) + self.kv


def find_levers(request: AllocationRequest, demand: MemoryDemand) -> list[Lever]:
    """Levers against the failure of `request`, those that are enough first, then by the bytes they free.

    What lacks is what the request lacked, or what all that is still to come will lack, if that is more.
    """
    capacity = demand.total
    available = request.free
    space = AddressSpace.read() if request.why is Why.ADDRESS_SPACE else None
    if space is not None:
        available = space.left(request.size)
        capacity = (request.live or 0) + available
    if request.why is Why.CAP:
        capacity = demand.total if demand.limit is None else demand.limit
        available = None if request.live is None else capacity - request.live
    # Sizes are computed, and the last bytes are the backend's own: ask for a little more than they say.
    # Scratch is given back before anything but weights is there.
    most = max(demand.weights + demand.scratch, demand.resident)
    needed = math.ceil(most * 1.01) + _BACKEND_MARGIN
    lacking = max(needed - capacity, 1)
    if available is not None:
        lacking = max(lacking, request.size - available)
    levers = [
        *(_more_device(demand, capacity + lacking) if space is None else more_address_space(space, lacking)),
        *_less_kv(demand, lacking),
        *_smaller_steps(demand, lacking),
    ]
    return sorted(levers, key=lambda lever: (not lever.enough, -lever.frees))


def describe_levers(levers: list[Lever]) -> str:
    """One line: what would do, or what helps together."""
    enough = [lever for lever in levers if lever.enough]
    if enough:
        checked = " (each planned again)" if all(lever.verified for lever in enough) else ""
        return "to make it fit: " + ", or ".join(map(str, enough)) + checked
    if levers:
        return "no flag alone makes it fit; these help: " + ", ".join(map(str, levers))
    return "no flag makes it fit"


def more_address_space(space: AddressSpace, lacking: int) -> list[Lever]:
    """What has the system map `lacking` bytes more; threads and libraries map some later, too."""
    frees = max(lacking, 1) + _LIBRARIES_MARGIN
    if space.limit is not None and space.limit - space.mapped < frees:
        kib = -(-(space.limit + frees) >> 10)
        return [Lever(flag="ulimit -v", value=str(kib), frees=frees, enough=True)]
    if space.overcommit in (0, 2):
        value = f"vm.overcommit_memory={0 if space.overcommit == 2 else 1}"
        return [Lever(flag="sysctl -w", value=value, frees=frees, enough=True)]
    return []


_BACKEND_MARGIN = 8 << 20
_LIBRARIES_MARGIN = 512 << 20


def _more_device(demand: MemoryDemand, needed: int) -> Iterator[Lever]:
    if demand.limit is not None and needed <= demand.total:
        share = math.ceil(100 * needed / demand.total) / 100
        frees = int(share * demand.total) - demand.limit
        if frees > 0:
            yield Lever(flag="--gpu-memory-utilization", value=f"{share:g}", frees=frees, enough=True)
    if demand.device == "cpu":
        share = 1.0 if demand.limit is None else demand.config.gpu_memory_utilization
        total, text = format_size(math.ceil(needed / share), up=True)
        if total > demand.total:
            frees = int((total - demand.total) * share)
            yield Lever(flag="--device-memory", value=text, frees=frees, enough=True)


def _less_kv(demand: MemoryDemand, lacking: int) -> Iterator[Lever]:
    config, limits = demand.config, demand.limits
    least_blocks = limits.max_blocks_per_seq if config.max_model_len else 1
    if config.kv_cache_memory is not None:
        wanted = max(demand.kv - lacking, least_blocks * demand.kv_block)
        size, text = format_size(wanted, up=False)
        size -= size % demand.kv_block
        if 0 < size < demand.kv:
            frees = demand.kv - size
            yield Lever(flag="--kv-cache-memory", value=text, frees=frees, enough=frees >= lacking)
        return
    blocks = (demand.kv - lacking) // demand.kv_block
    blocks = max(min(blocks, limits.max_blocks_per_seq - 1), 1)
    frees = demand.kv - blocks * demand.kv_block
    if frees > 0:
        length = str(blocks * limits.block_size)
        yield Lever(flag="--max-model-len", value=length, frees=frees, enough=frees >= lacking)
    if demand.kv_dtype is not DType.FLOAT8_E4M3:
        frees = demand.kv - demand.kv // demand.kv_dtype.itemsize
        yield Lever(flag="--kv-cache-dtype", value="fp8", frees=frees, enough=frees >= lacking)


def _smaller_steps(demand: MemoryDemand, lacking: int) -> Iterator[Lever]:
    limits = demand.limits
    now = demand.workspace(limits)

    def lever(flag: str, value: int, smaller: EngineLimits) -> Lever | None:
        frees = now - demand.workspace(smaller)
        return Lever(flag=flag, value=str(value), frees=frees, enough=frees >= lacking) if frees > 0 else None

    # Rows of logits that were asked for are no less for it that there are fewer tokens: they have their flag.
    asked = min(demand.config.max_logits_rows or 0, limits.max_num_batched_tokens)

    def fewer_tokens(value: int) -> Lever | None:
        rows = max(min(limits.max_logits_rows, value), limits.max_num_seqs)
        smaller = msgspec.structs.replace(limits, max_num_batched_tokens=value, max_logits_rows=rows)
        return lever("--max-num-batched-tokens", value, smaller)

    def fewer_rows(value: int) -> Lever | None:
        return lever("--max-logits-rows", value, msgspec.structs.replace(limits, max_logits_rows=value))

    def fewer_seqs(value: int) -> Lever | None:
        rows = max(demand.config.max_logits_rows or 0, value)
        smaller = msgspec.structs.replace(limits, max_num_seqs=value, max_logits_rows=rows)
        return lever("--max-num-seqs", value, smaller)

    for make, highest, lowest in (
        (fewer_tokens, limits.max_num_batched_tokens, max(limits.max_num_seqs, asked, 16)),
        (fewer_rows, asked, limits.max_num_seqs),
        (fewer_seqs, limits.max_num_seqs, 1),
    ):
        candidates = [found for value in _halvings(highest, lowest) if (found := make(value)) is not None]
        # The gentlest that does; failing that, the harshest.
        if candidates:
            yield next((found for found in candidates if found.enough), candidates[-1])


def _halvings(highest: int, lowest: int) -> Iterator[int]:
    """Powers of two below `highest`, down to `lowest`."""
    value = 1 << (highest - 1).bit_length() - 1 if highest > 1 else 0
    while value >= lowest:
        yield value
        value //= 2


def format_size(count: int, *, up: bool) -> tuple[int, str]:
    """`count` bytes in about three digits, rounded `up` or down: the bytes, and a flag's text for them."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            scale = 100 if count < 10 << power else 10 if count < 100 << power else 1
            steps = (math.ceil if up else math.floor)(count * scale / (1 << power))
            # Fractions are rounded down to whole bytes where they are read.
            return steps * (1 << power) // scale, f"{steps / scale:g}{unit}"
    return count, str(count)
