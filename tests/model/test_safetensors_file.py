"""Headers that lie, and files that are not what they say: one line each, and no byte outside the file."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import CheckpointError, UnsupportedModelError, VtserveError
from engine.model.safetensors_file import MappedFile, list_tensors
from tests.model.checkpoint_files import write_file, write_tensors

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def entry(start: int, end: int, *, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - start) // 4] if shape is None else shape,
        "data_offsets": [start, end],
    }


def write(path: Path, header: Any, body: bytes = bytes(16), length: int | None = None) -> Path:
    file = path / "model.safetensors"
    write_file(file, header if isinstance(header, bytes) else json.dumps(header).encode(), body, length)
    return file


def refuse(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        list_tensors(file)
    said = str(caught.value)
    assert said.startswith(f"{file}: ")
    assert "\n" not in said
    assert len(said) < len(str(file)) + 400
    return said


def test_tensors_lie_where_the_header_says(tmp_path: Path) -> None:
    """In any order of names, and of types of any size."""
    rng = np.random.default_rng(0)
    arrays = {
        "b": rng.normal(size=(3, 5)).astype(np.float32),
        "a": rng.integers(0, 256, (7,)).astype(np.uint8),
        "c": rng.normal(size=(2, 2, 2)).astype(np.float16),
        "empty": np.zeros((0, 4), np.float32),
        "number": np.float32(3.5).reshape(()),
    }
    names = {"float32": "F32", "uint8": "U8", "float16": "F16"}
    file = tmp_path / "model.safetensors"
    write_tensors(file, {name: (names[str(a.dtype)], a.shape, a.tobytes()) for name, a in arrays.items()})
    tensors, mapped = list_tensors(file), MappedFile(file)
    assert set(tensors) == set(arrays)
    for name, array in arrays.items():
        found = mapped.view(name, tensors[name])
        assert found.shape == array.shape
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        assert found.flags.aligned
        mapped.release(tensors[name])
        np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("the same bytes twice", {"a": entry(0, 16), "b": entry(0, 16)}),
        ("overlapping", {"a": entry(0, 12), "b": entry(8, 16)}),
        ("a hole", {"a": entry(0, 4), "b": entry(8, 16)}),
        ("bytes left over", {"a": entry(0, 12)}),
        ("beyond the end", {"a": entry(0, 32)}),
        ("backwards", {"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}),
        ("negative", {"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}),
        ("a shape that takes more", {"a": entry(0, 16, shape=[8])}),
        ("a shape that takes less", {"a": entry(0, 16, shape=[2])}),
        ("a shape that overflows", {"a": entry(0, 16, shape=[2**32, 2**32, 2**32])}),
        ("a shape of 2**64 + 4", {"a": entry(0, 16, shape=[2**64 + 4])}),
        ("a negative shape", {"a": entry(0, 16, shape=[-4])}),
        ("an unknown type", {"a": entry(0, 16, dtype="F128")}),
        ("no type", {"a": {"shape": [4], "data_offsets": [0, 16]}}),
        ("no object", [1, 2]),
        ("a string", {"a": "F32"}),
        ("floats", {"a": {"dtype": "F32", "shape": [4.0], "data_offsets": [0.0, 16.0]}}),
        ("metadata that is none", {"__metadata__": {"a": 1}, "a": entry(0, 16)}),
    ],
)
def test_headers_that_lie(tmp_path: Path, name: str, header: Any) -> None:
    assert "not a sound safetensors file" in refuse(write(tmp_path, header))


def test_more_dimensions_than_an_array_has(tmp_path: Path) -> None:
    header = {"a": entry(0, 16, shape=[4] + [1] * 64)}
    assert "tensor a: expected at most 64 dimensions, found 65" in refuse(write(tmp_path, header))
    assert list_tensors(write(tmp_path, {"a": entry(0, 16, shape=[4] + [1] * 63)}))


@pytest.mark.parametrize("length", [0, 1, 10**3, 10**8 + 1, 2**31, 2**40, 2**63, 2**64 - 1])
def test_lengths_of_headers_that_lie(tmp_path: Path, length: int) -> None:
    """Without reading, or asking memory for, as much as they say."""
    refuse(write(tmp_path, {"a": entry(0, 16)}, length=length))


@pytest.mark.parametrize(
    "header", [b"", b"{", b"null", b"\xff\xfe", b"[" * 50_000, b'{"a":' * 50_000, b'{"a": 1e999}', b" " * 64]
)
def test_headers_that_are_no_json_of_tensors(tmp_path: Path, header: bytes) -> None:
    refuse(write(tmp_path, header))


def test_a_name_that_is_there_twice(tmp_path: Path) -> None:
    """Either is refused or one of them counts, which the offsets then cover: never bytes of another."""
    one, other = json.dumps(entry(0, 8)), json.dumps(entry(8, 16))
    file = write(tmp_path, f'{{"a": {one}, "a": {other}}}'.encode())
    refuse(file)


def test_names_of_any_kind_are_shown_on_one_line(tmp_path: Path) -> None:
    name = "a\nb\x1b[31m" + "c" * 5000
    said = refuse(write(tmp_path, {name: entry(0, 16, shape=[5])}))
    assert "\x1b" not in said


def test_types_that_are_not_read(tmp_path: Path) -> None:
    file = write(tmp_path, {"a": entry(0, 16, dtype="I64", shape=[2])})
    tensors = list_tensors(file)
    assert tensors["a"].nbytes == 16
    with pytest.raises(UnsupportedModelError, match="tensor a: element type I64 is not served"):
        MappedFile(file).view("a", tensors["a"])


def test_a_tensor_that_is_not_aligned_is_copied(tmp_path: Path) -> None:
    body = b"\1" + np.arange(3, dtype=np.float32).tobytes()
    header = {"a": entry(0, 1, dtype="U8", shape=[1]), "b": entry(1, 13)}
    file = write(tmp_path, header, body)
    view = MappedFile(file).view("b", list_tensors(file)["b"])
    assert view.flags.aligned
    np.testing.assert_array_equal(view, [0, 1, 2])


def test_files_that_are_no_files(tmp_path: Path) -> None:
    assert "No such file" in refuse(tmp_path / "nothing.safetensors")
    refuse(tmp_path)
    empty = tmp_path / "empty.safetensors"
    empty.write_bytes(b"")
    refuse(empty)


# -- anything ----------------------------------------------------------------------------------------------

OFFSETS = st.one_of(st.integers(-4, 40), st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1, 2**64]))
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F8_E4M3", "I64", "F4", "X", "", None]),
        "shape": st.lists(OFFSETS, max_size=3),
        "data_offsets": st.lists(OFFSETS, min_size=1, max_size=3),
    }
)
HEADERS = st.dictionaries(st.text(max_size=4), ENTRIES, max_size=3)


def check_any(file: Path) -> None:
    """An error of ours in one line, or tensors that lie within the file, apart from each other."""
    said, tensors = "", {}
    try:
        tensors = list_tensors(file)
    except VtserveError as error:
        said = str(error)
    if said:
        assert str(file) in said
        assert "\n" not in said
        return
    size = file.stat().st_size
    ends = sorted((t.start, t.start + t.nbytes) for t in tensors.values() if t.nbytes)
    assert all(8 <= start <= end <= size for start, end in ends)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    mapped = MappedFile(file)
    for name, stored in tensors.items():
        try:
            view = mapped.view(name, stored)
        except UnsupportedModelError:
            continue
        assert view.nbytes == stored.nbytes
        assert view.tobytes() == file.read_bytes()[stored.start : stored.start + stored.nbytes]


@FUZZ
@given(header=HEADERS, size=st.integers(0, 40))
def test_any_header(tmp_path: Path, header: Any, size: int) -> None:
    check_any(write(tmp_path, header, bytes(range(size))))


@FUZZ
@given(data=st.data())
def test_any_damage(tmp_path: Path, data: st.DataObject) -> None:
    """A sound file with some bytes changed, cut off, or added."""
    file = write(tmp_path, {"a": entry(0, 8), "b": entry(8, 16)})
    damaged = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(damaged)))
    file.write_bytes(bytes(damaged[:end]) + data.draw(st.binary(max_size=9)))
    check_any(file)
