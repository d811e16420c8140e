from __future__ import annotations

import asyncio
import importlib
import inspect
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.memory.errors import OutOfMemoryError
from engine.memory.resources import HostMemoryResource
from engine.memory.scope import (
    FIRST_SEGMENTS,
    allocation_helper,
    allocation_library,
    call_site,
    current_requests,
    current_tag,
    memory_scope,
    request_scope,
)


def here(offset: int = 0) -> str:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"tests/memory/test_scope.py:{frame.f_back.f_lineno + offset}"


def test_scopes_nest_by_replacing_the_tag() -> None:
    assert current_tag() == "other"
    with memory_scope("weights/a"):
        assert current_tag() == "weights/a"
        with memory_scope("repack/a"):
            assert current_tag() == "repack/a"
        assert current_tag() == "weights/a"
    assert current_tag() == "other"


def test_an_exception_leaves_the_scope_behind() -> None:
    with pytest.raises(KeyError), memory_scope("kv"), request_scope(["r"]):
        raise KeyError
    assert (current_tag(), current_requests()) == ("other", ())


@pytest.mark.parametrize("tag", ["", "weight/a", "Weights", "/kv", "model.layers.0"])
def test_a_tag_begins_with_a_known_segment(tag: str) -> None:
    with (
        pytest.raises(ValueError, match="weights, repack, kv, workspace, graph, io, other"),
        memory_scope(tag),
    ):
        pass


@given(st.sampled_from(FIRST_SEGMENTS), st.text())
def test_no_tensor_name_breaks_a_line(segment: str, name: str) -> None:
    with memory_scope(f"{segment}/{name}"):
        tag = current_tag()
    assert tag.split() == [tag]
    assert len(tag.splitlines()) == 1
    assert len(tag) == len(f"{segment}/{name}")
    tag.encode()


def test_requests_are_in_scope_inside_only() -> None:
    with request_scope(["a", "b c"]):
        assert current_requests() == ("a", "b?c")
    assert current_requests() == ()


def test_a_thread_starts_outside_of_any_scope_and_tasks_keep_their_own() -> None:
    seen: list[str] = []
    with memory_scope("kv"):
        thread = threading.Thread(target=lambda: seen.append(current_tag()))
        thread.start()
        thread.join()
    assert seen == ["other"]

    async def tagged(tag: str) -> str:
        with memory_scope(tag):
            await asyncio.sleep(0)
            return current_tag()

    async def both() -> list[str]:
        return await asyncio.gather(tagged("kv/a"), tagged("io/b"))

    assert asyncio.run(both()) == ["kv/a", "io/b"]


def test_the_call_site_is_the_line_that_asks() -> None:
    assert call_site() == here()
    sites = [call_site() for _ in range(2)]
    assert sites == [here(-1)] * 2


def test_frames_of_the_house_are_not_call_sites() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        HostMemoryResource(0).allocate(1)
    assert caught.value.site == here(-1)


def test_a_marked_helper_is_not_a_call_site() -> None:
    @allocation_helper
    def empty() -> str:
        return call_site()

    def unmarked() -> str:
        return call_site()

    assert empty() == here()
    assert unmarked() == here(-3)


def test_a_marked_library_is_no_call_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("arrays", "arrays_of_others"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("from .deep import empty\n")
        (tmp_path / name / "deep.py").write_text(
            "from engine.memory.scope import call_site\ndef empty():\n    return call_site()\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    arrays, others = importlib.import_module("arrays"), importlib.import_module("arrays_of_others")
    assert arrays.empty() == f"{tmp_path}/arrays/deep.py:3"
    for _ in range(2):
        allocation_library(arrays)
        assert arrays.empty() == here()
    assert others.empty() == f"{tmp_path}/arrays_of_others/deep.py:3"


def test_code_outside_the_tree_keeps_its_path() -> None:
    namespace: dict[str, str] = {}
    exec(
        compile("from engine.memory.scope import call_site\nsite = call_site()", "/else where/x.py", "exec"),
        namespace,
    )
    assert namespace["site"] == "/else?where/x.py:2"
