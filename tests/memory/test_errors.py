from __future__ import annotations

import json
import pickle

import pytest

import engine.errors
from engine.memory.errors import (
    AllocationError,
    AllocationRequest,
    OutOfMemoryError,
    StickyDeviceError,
    TraceFileError,
    UnknownPointerError,
    VtserveError,
    Why,
    describe_bytes,
)

REQUEST = AllocationRequest(
    size=606 << 20,
    api="malloc",
    tag="kv",
    site="engine/kv_cache.py:88",
    why=Why.FRAGMENTATION,
    error="out of memory",
    error_code=2,
    free=13 << 30,
    live=6 << 30,
    requests=("r1", "r2"),
)


@pytest.mark.parametrize("kind", [AllocationError, OutOfMemoryError, StickyDeviceError])
def test_the_text_is_one_line_with_every_fact(kind: type[AllocationError]) -> None:
    error = kind(REQUEST)
    error.complete(sequence=717)
    text = str(error)
    assert len(text.splitlines()) == 1
    for fact in (
        "#717", "606.0 MiB", "out of memory", "why=fragmentation", "api=malloc", "live=6.00 GiB",
        "free=13.00 GiB", "tag=kv", "site=engine/kv_cache.py:88", "requests=r1,r2",
    ):  # fmt: skip
        assert fact in text


def test_an_error_crosses_a_process_border_whole() -> None:
    error = OutOfMemoryError(REQUEST)
    error.complete(sequence=3)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is OutOfMemoryError
    assert copy.request == error.request
    assert copy.sequence == 3


def test_a_request_is_json() -> None:
    facts = json.loads(json.dumps(REQUEST.to_dict()))
    assert facts["why"] == "fragmentation"
    assert facts["requests"] == ["r1", "r2"]
    assert set(facts) == set(REQUEST.__slots__)


def test_one_root() -> None:
    assert engine.errors.VtserveError is VtserveError
    for kind in (AllocationError, TraceFileError, UnknownPointerError, engine.errors.ConfigurationError):
        assert issubclass(kind, VtserveError)
    assert issubclass(OutOfMemoryError, AllocationError)
    assert not issubclass(StickyDeviceError, OutOfMemoryError)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (96, "96 B"),
        (2048, "2.0 KiB"),
        (606 << 20, "606.0 MiB"),
        (3 << 29, "1.50 GiB"),
        (-5, "-5 B"),
    ],
)
def test_bytes_for_a_person(count: int, text: str) -> None:
    assert describe_bytes(count) == text
