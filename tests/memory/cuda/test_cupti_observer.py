"""What is made of CUPTI's records and callbacks. They are as CUPTI 13.0 gave them on an H200."""

from __future__ import annotations

import ctypes
import enum
import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.devices import choose_device
from engine.memory.cuda.bypass import BypassBook, ObservedAllocation, ObservedFailure
from engine.memory.cuda.cupti_observer import CuptiObserver
from engine.memory.errors import ConfigurationError

MIB = 1 << 20


class Kind(enum.IntEnum):
    PINNED = 2
    DEVICE = 3
    ARRAY = 4
    MANAGED = 5
    DEVICE_STATIC = 6
    MANAGED_STATIC = 7


class Site(enum.IntEnum):
    API_ENTER = 0
    API_EXIT = 1


class Domain(enum.IntEnum):
    DRIVER_API = 1
    RUNTIME_API = 2


class Operation(enum.IntEnum):
    ALLOCATION = 1
    RELEASE = 2


class FakeCupti(ModuleType):
    """The part of cupti-python that the observer uses; records are delivered when they are flushed."""

    ActivityKind = SimpleNamespace(MEMORY2=49)
    ActivityMemoryKind = Kind
    ActivityMemoryOperationType = Operation
    ActivityMemoryPoolType = SimpleNamespace(LOCAL=1)
    CallbackDomain = Domain
    ApiCallbackSite = Site
    RuntimeApiTraceCbid = SimpleNamespace(
        cudaMalloc_v3020=20, cudaMallocPitch_v3020=21, cudaMallocAsync_v11020=373
    )
    DriverApiTraceCbid = SimpleNamespace(cuMemAlloc_v2=243, cuMemAllocAsync=598)

    def __init__(self) -> None:
        super().__init__("cupti.cupti")
        self.records: list[Any] = []
        self.enabled: set[int] = set()
        self.subscribed: Callable[..., None] | None = None
        self.watched: set[tuple[int, int]] = set()
        self.broken: set[str] = set()

    def _may(self, name: str) -> None:
        if name in self.broken:
            raise RuntimeError(f"CUPTI_ERROR: {name}")

    def activity_register_callbacks(self, wanted: Any, completed: Any) -> None:
        self._may("activity_register_callbacks")
        assert wanted() == (1 << 20, 0)
        self.completed = completed

    def activity_enable(self, kind: int) -> None:
        self._may("activity_enable")
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        self._may("activity_disable")
        self.enabled.remove(kind)

    def activity_enable_allocation_source(self, enable: int) -> None:
        self._may("activity_enable_allocation_source")

    def activity_flush_all(self, flag: int) -> None:
        self._may("activity_flush_all")
        records, self.records = self.records, []
        self.completed(records)

    def subscribe(self, callback: Any, userdata: Any) -> int:
        self._may("subscribe")
        self.subscribed = callback
        return 7

    def enable_callback(self, enable: int, subscriber: int, domain: int, cbid: int) -> None:
        assert (enable, subscriber) == (1, 7)
        self.watched.add((domain, cbid))

    def unsubscribe(self, subscriber: int) -> None:
        assert subscriber == 7
        self.subscribed = None

    def call(
        self, domain: Domain, cbid: int, parameters: list[int], inner: Any = None, code: int = 0
    ) -> None:
        """A call of CUDA's, with what it calls itself, as CUPTI tells it."""
        assert self.subscribed is not None
        if (domain, cbid) not in self.watched:
            return
        block = (ctypes.c_size_t * len(parameters))(*parameters)
        status = ctypes.c_int(code)
        facts = SimpleNamespace(
            function_params=ctypes.addressof(block), function_return_value=ctypes.addressof(status)
        )
        self.subscribed(None, domain, cbid, SimpleNamespace(callback_site=0, **vars(facts)))
        if inner is not None:
            inner()
        self.subscribed(None, domain, cbid, SimpleNamespace(callback_site=1, **vars(facts)))


def record(operation: Operation, kind: Kind, address: int, size: int, **more: Any) -> SimpleNamespace:
    pool = more.pop("pool", (0, 0, 0))
    facts = {"name": "", "source": "", "timestamp": 0} | more
    return SimpleNamespace(
        kind=49,
        memory_operation_type=operation,
        memory_kind=kind,
        address=address,
        bytes=size,
        is_async=int(pool[1] > 0),
        memory_pool_config=SimpleNamespace(
            memory_pool_type=pool[0], address=pool[1], pool=SimpleNamespace(size_=pool[2])
        ),
        **facts,
    )


class Book(BypassBook):
    """Keeps what it was told, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[ObservedAllocation | ObservedFailure] = []

    def observe(self, report: ObservedAllocation | ObservedFailure) -> None:
        self.told.append(report)
        super().observe(report)


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> FakeCupti:
    fake = FakeCupti()
    package = ModuleType("cupti")
    package.cupti = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setitem(sys.modules, "cupti.cupti", fake)
    return fake


def test_records_become_reports_in_the_order_of_time(cupti: FakeCupti) -> None:
    book = Book()
    observer = CuptiObserver(book)
    library = "/usr/lib/libcublas.so.13"
    cupti.records = [
        record(Operation.RELEASE, Kind.DEVICE, 0x7F00, 48 * MIB, timestamp=9),
        record(Operation.ALLOCATION, Kind.DEVICE, 0x7F00, 48 * MIB, timestamp=3, source=library),
        record(Operation.ALLOCATION, Kind.PINNED, 0x1000, MIB, timestamp=4),
        record(
            Operation.ALLOCATION, Kind.DEVICE_STATIC, 0x9000, 112, timestamp=5, name="lut", source=library
        ),
        record(Operation.ALLOCATION, Kind.DEVICE, 0x3020, 40 * MIB, timestamp=6, pool=(1, 0x3000, 64 * MIB)),
        record(Operation.ALLOCATION, Kind.DEVICE, 0, 32 * MIB, timestamp=7),
        record(Operation.ALLOCATION, Kind.DEVICE, 0x3030, 24 * MIB, timestamp=8, pool=(1, 0x3100, 0)),
        SimpleNamespace(kind=50, timestamp=1),
    ]
    assert book.told == [], "nothing comes before it is flushed"
    observer.flush()
    assert book.told == [
        ObservedAllocation(0x7F00, 48 * MIB, name="libcublas.so.13"),
        ObservedAllocation(0x9000, 112, "device_static", "lut"),
        ObservedAllocation(0x3020, 40 * MIB, pool=0x3000, pool_reserved=64 * MIB),
        ObservedAllocation(0, 32 * MIB, "graph_reserve"),
        ObservedAllocation(0x3030, 24 * MIB, pool=0x3100),
        ObservedAllocation(0x7F00, 48 * MIB, is_release=True),
    ]


def test_a_refusal_is_reported_once_though_the_runtime_calls_the_driver(cupti: FakeCupti) -> None:
    book = Book()
    CuptiObserver(book)

    def inner() -> None:
        cupti.call(Domain.DRIVER_API, 243, [1, 8 << 40], code=2)

    cupti.call(Domain.RUNTIME_API, 20, [1, 8 << 40], inner, code=2)
    cupti.call(Domain.DRIVER_API, 598, [1, 5 * MIB, 0], code=2)
    cupti.call(Domain.RUNTIME_API, 21, [1, 2, 640, 480], code=2)
    cupti.call(Domain.RUNTIME_API, 373, [1, MIB, 0])  # granted: the record tells of it
    assert book.told == [
        ObservedFailure(8 << 40, "cudaMalloc", 2),
        ObservedFailure(5 * MIB, "cuMemAllocAsync", 2),
        ObservedFailure(640, "cudaMallocPitch", 2),
    ]


def test_a_refusal_of_ours_is_no_bypass(cupti: FakeCupti) -> None:
    book = Book()
    CuptiObserver(book)
    with book.asking():
        cupti.call(
            Domain.RUNTIME_API, 20, [1, MIB], lambda: cupti.call(Domain.DRIVER_API, 243, [1, MIB], code=2), 2
        )
    assert book.told == []
    cupti.call(Domain.DRIVER_API, 243, [1, MIB], code=2)
    assert len(book.told) == 1


def test_closing_ends_all_of_it(cupti: FakeCupti) -> None:
    book = Book()
    observer = CuptiObserver(book)
    assert cupti.enabled == {49}
    cupti.records = [record(Operation.ALLOCATION, Kind.DEVICE, 0x7F00, MIB)]
    observer.close()
    observer.close()
    assert len(book.told) == 1, "what happened until then is reported"
    assert (cupti.enabled, cupti.subscribed) == (set(), None)
    cupti.records = [record(Operation.ALLOCATION, Kind.DEVICE, 0x7F00, MIB)]
    observer.flush()
    assert len(book.told) == 1


def test_a_watcher_that_fails_is_no_failure_of_what_is_watched(
    cupti: FakeCupti, caplog: pytest.LogCaptureFixture
) -> None:
    book = Book()
    observer = CuptiObserver(book)
    cupti.records = [SimpleNamespace(kind=49, timestamp=0)]
    observer.flush()
    assert "cannot be read" in caplog.text
    cupti.broken = {"activity_flush_all", "activity_disable"}
    observer.flush()
    assert "CUPTI tells no more" in caplog.text
    observer.close()


def test_what_an_older_cupti_lacks_is_done_without(
    cupti: FakeCupti, caplog: pytest.LogCaptureFixture
) -> None:
    cupti.broken = {"activity_enable_allocation_source", "subscribe"}
    book = Book()
    with caplog.at_level(logging.INFO):
        observer = CuptiObserver(book)
    assert "requests that fail behind the allocator are not seen" in caplog.text
    cupti.records = [record(Operation.ALLOCATION, Kind.DEVICE, 0x7F00, MIB)]
    observer.close()
    assert book.told == [ObservedAllocation(0x7F00, MIB)]


def test_without_cupti_it_is_one_line_that_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    monkeypatch.setattr("engine.backend.cuda.requirements.check_device", lambda index: 8 << 30)
    device = choose_device(EngineConfig(model="m", device="cuda"), {})
    with pytest.raises(ConfigurationError, match=r"^VT_CUDA_ALLOC_OBSERVE: .*vtserve\[observe\]") as caught:
        device.open_memory(observe=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("broken", ["activity_register_callbacks", "activity_enable"])
def test_another_profiler_in_the_process_is_said_in_a_line(cupti: FakeCupti, broken: str) -> None:
    cupti.broken = {broken}
    with pytest.raises(ConfigurationError, match=r"^VT_CUDA_ALLOC_OBSERVE: CUPTI cannot be used: "):
        CuptiObserver(Book())
