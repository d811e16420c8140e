"""Device memory that went past the injected allocator: what an observer of the device saw, less our own.

A library, a module's globals, a graph, a kernel that calls a pool itself: none of them asks a memory
resource. An observer (`engine.memory.cuda.cupti_observer`) reports every allocation and release on the
device, ours among them, some time after it happened. `BypassBook` strikes out ours; what is left went past
us.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Bypass", "BypassBook", "ObservedAllocation", "ObservedFailure", "Observer"]

_NAME_LENGTH = 52
"""A trace record holds 104 bytes of text: kind, name and what follows it."""


@dataclass(frozen=True, slots=True)
class ObservedAllocation:
    """One allocation or release on the device, as an observer reports it."""

    address: int
    """0: no block, but what graphs reserve for the blocks that they ask for"""
    size: int
    """bytes, as they were asked for"""
    kind: str = "device"
    """``device``, ``device_static`` (a module's variable), ``array``, ``managed``, ``managed_static``,
    ``graph_reserve``"""
    name: str = ""
    """of a variable, or of the library that asked, where it is known"""
    is_release: bool = False
    pool: int = 0
    """address of the stream-ordered pool that it came from; 0: from none"""
    pool_reserved: int = 0
    """bytes that the pool held of the device afterwards; 0: not told"""


@dataclass(frozen=True, slots=True)
class ObservedFailure:
    """A request that the driver refused, and that no memory resource made."""

    size: int
    call: str
    """``cudaMalloc``, ``cuMemAllocAsync``, …"""
    error_code: int


@dataclass(frozen=True, slots=True)
class Bypass:
    """Device memory that no memory resource gave, or was to give."""

    size: int
    kind: str
    name: str
    address: int = 0
    pool: int = 0
    in_library_step: bool = False
    """while kernels or libraries were loaded: the ledger's ``library`` has these bytes already"""
    error_code: int = 0
    """the driver's, if it refused the request"""

    def describe(self) -> str:
        """What follows ``BYPASS size=…`` on a line."""
        text = f"kind={self.kind} name={_shortened(' '.join(self.name.split())) or 'unknown'}"
        if self.error_code:
            return f"{text} failed=yes code={self.error_code}"
        return f"{text} step=library" if self.in_library_step else text


class Observer(Protocol):
    """Sees the device's allocations and reports them to a `BypassBook`."""

    def flush(self) -> None:
        """Report everything up to now."""

    def close(self) -> None:
        """Watch no more. Idempotent."""


class BypassBook:
    """Matches what was observed with what the memory resources asked for.

    Reports come late and from the observer's thread, so nothing is judged before `settle`.

    Attributes
    ----------
    listener
        Called with each bypass once, by `settle`.
    observer
        Flushed by `settle`, closed by `close`; None: reports come by themselves.
    """

    def __init__(self) -> None:
        self.listener: Callable[[Bypass], None] = lambda bypass: None
        self.observer: Observer | None = None
        self._asking = threading.RLock()
        """held over a call of the driver's and its entry here, so that no settling comes between"""
        self._lock = threading.Lock()
        self._ours = threading.local()
        self._own: Counter[tuple[int, int]] = Counter()
        """blocks that resources got and no report has named yet"""
        self._own_releases: Counter[int] = Counter()
        self._own_live: set[int] = set()
        self._own_pools: set[int] = set()
        self._reports: list[ObservedAllocation | ObservedFailure] = []
        self._live: dict[int, Bypass] = {}
        self._reserved: dict[int, int] = {}
        """bytes of the device that pools hold, other than ours; those that are told"""
        self._graphs_reserve = 0

    # -- what the resources do -----------------------------------------------------------------------------

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around a call of the driver's that a resource makes: a failure inside is no bypass."""
        with self._asking:
            self._ours.depth = getattr(self._ours, "depth", 0) + 1
            try:
                yield
            finally:
                self._ours.depth -= 1

    @property
    def is_ours(self) -> bool:
        """Whether the calling thread is inside `asking`."""
        return getattr(self._ours, "depth", 0) > 0

    def expect(self, address: int, size: int) -> None:
        """A resource got this block. To be called inside `asking`."""
        with self._lock:
            self._own[address, size] += 1
            self._own_live.add(address)

    def expect_release(self, address: int) -> None:
        """A resource is about to give this block back."""
        with self._lock:
            self._own_releases[address] += 1
            self._own_live.discard(address)

    # -- what the observer sees ----------------------------------------------------------------------------

    def observe(self, report: ObservedAllocation | ObservedFailure) -> None:
        """Take a report. Called by the observer, from any thread."""
        with self._lock:
            self._reports.append(report)

    # -- what came of it -----------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Bytes of the device that went past the resources and are still held.

        Of a pool that is not ours all that it reserved, of ours nothing: its own figures have that already.
        Without what library steps have counted.
        """
        with self._lock:
            counted = [bypass for bypass in self._live.values() if not bypass.in_library_step]
            blocks = sum(bypass.size for bypass in counted if not bypass.pool)
            # Blocks of graphs are in what graphs reserve.
            untold = sum(
                bypass.size
                for bypass in counted
                if bypass.pool and bypass.pool not in self._reserved and bypass.pool not in self._own_pools
            )
            return blocks + sum(self._reserved.values()) + max(untold, self._graphs_reserve)

    def settle(self, *, in_library_step: bool = False) -> list[Bypass]:
        """Judge everything that happened until now: what is nobody's, is told to `listener` and returned."""
        found: list[Bypass] = []
        with self._asking:
            if self.observer is not None:
                self.observer.flush()
            with self._lock:
                reports, self._reports = self._reports, []
                for report in reports:
                    if isinstance(report, ObservedFailure):
                        found.append(Bypass(report.size, "device", report.call, error_code=report.error_code))
                    elif report.address == 0:
                        self._graphs_reserve += -report.size if report.is_release else report.size
                        if not report.is_release:
                            found.append(Bypass(report.size, report.kind, report.name))
                    elif report.is_release:
                        self._released(report)
                    elif self._strike_out(report):
                        if report.pool:
                            self._own_pools.add(report.pool)
                            self._reserved.pop(report.pool, None)
                    else:
                        found.append(self._bypassed(report, in_library_step))
                # Two blocks never have one address at a time: where ours is, a bypass has ended, whichever of
                # the reports was taken for whose.
                for address in self._live.keys() & self._own_live:
                    del self._live[address]
        for bypass in found:
            self.listener(bypass)
        return found

    def close(self) -> None:
        """Stop watching. Idempotent."""
        observer, self.observer = self.observer, None
        if observer is not None:
            observer.close()

    def _strike_out(self, report: ObservedAllocation) -> bool:
        key = (report.address, report.size)
        if key not in self._own:
            return False
        self._own[key] -= 1
        if not self._own[key]:
            del self._own[key]
        return True

    def _bypassed(self, report: ObservedAllocation, in_library_step: bool) -> Bypass:
        bypass = Bypass(
            size=report.size,
            kind=f"{report.kind}_async" if report.pool else report.kind,
            name=report.name,
            address=report.address,
            pool=report.pool,
            in_library_step=in_library_step,
        )
        self._live[report.address] = bypass
        self._note_pool(report, in_library_step)
        return bypass

    def _released(self, report: ObservedAllocation) -> None:
        # Addresses come again: a release of ours must not end a bypass that had the address before or after.
        if report.address in self._own_releases:
            self._own_releases[report.address] -= 1
            if not self._own_releases[report.address]:
                del self._own_releases[report.address]
            return
        gone = self._live.pop(report.address, None)
        if gone is not None:
            self._note_pool(report, gone.in_library_step)

    def _note_pool(self, report: ObservedAllocation, in_library_step: bool) -> None:
        pool = report.pool
        if not pool or pool in self._own_pools or in_library_step:
            return
        if any(bypass.pool == pool for bypass in self._live.values()):
            if report.pool_reserved:
                self._reserved[pool] = report.pool_reserved
        else:
            # The pool gives back what it holds at the next synchronisation, unless it was told to keep it.
            self._reserved.pop(pool, None)


def _shortened(name: str) -> str:
    """Both ends of a long name: mangled ones begin alike."""
    if len(name) <= _NAME_LENGTH:
        return name
    kept = (_NAME_LENGTH - 1) // 2
    return f"{name[:kept]}~{name[-(_NAME_LENGTH - 1 - kept) :]}"
