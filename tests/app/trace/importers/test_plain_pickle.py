"""Plain data comes back; whatever could run, or fill the memory, is refused in a line."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.trace.importers.plain_pickle import load_plain
from engine.memory.errors import TraceFileError

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(plain, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_comes_back(value: object, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol), "p") == value


class Runs:
    def __init__(self, what: tuple[Any, ...]) -> None:
        self.what = what

    def __reduce__(self) -> tuple[Any, ...]:
        return self.what


HOSTILE = {
    "a command": pickle.dumps(Runs((os.system, ("echo hostile >&2",)))),
    "a process": pickle.dumps({"segments": [Runs((subprocess.run, (["true"],)))]}),
    "eval, protocol 0": pickle.dumps(Runs((eval, ("1",))), 0),
    "a class": pickle.dumps(OrderedDict(a=1)),
    "a name": pickle.dumps(print),
    "a huge memo": b"\x80\x02]r\xff\xff\xff\xff.",
    "a huge bytearray": b"\x80\x05\x96" + (1 << 50).to_bytes(8, "little") + b".",
    "a huge string": b"\x80\x04\x8d" + (1 << 50).to_bytes(8, "little") + b"x.",
    "a huge frame": b"\x80\x04\x95" + (1 << 60).to_bytes(8, "little") + b"].",
    "a huge number": b"\x80\x04\x8b" + (1 << 30).to_bytes(4, "little") + b"x.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02]Q.",
    "protocol 99": b"\x80\x63].",
    "nothing": b"",
    "an end": b".",
    "no end": b"\x80\x04]",
    "a key that is a list": b"\x80\x04}]K\x01s.",
    "items for a list": b"\x80\x04](K\x01K\x02u.",
}
HARMLESS = {"a huge memo", "a huge frame"}
"""tell nothing untrue, and take no memory"""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_told_in_a_line(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    if name in HARMLESS:
        assert load_plain(HOSTILE[name], "p") == []
    else:
        with pytest.raises(TraceFileError, match=r"^p: not a pickle of plain data: .+") as caught:
            load_plain(HOSTILE[name], "p")
        assert len(str(caught.value).splitlines()) == 1
    assert capfd.readouterr() == ("", "")


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_plain_data_or_a_line(data: bytes, begun: bool) -> None:
    said = ""
    try:
        load_plain(b"\x80\x04" + data if begun else data, "p")
    except TraceFileError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1


@given(plain, st.data())
def test_truncated_and_damaged_pickles(value: object, draw: st.DataObject) -> None:
    data = bytearray(pickle.dumps([value], 4))
    place = draw.draw(st.integers(2, len(data) - 1))
    with pytest.raises(TraceFileError):
        load_plain(bytes(data[:place]), "p")
    data[place] ^= 1 << draw.draw(st.integers(0, 7))
    with suppress(TraceFileError):
        load_plain(bytes(data), "p")
