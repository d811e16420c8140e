"""JSON files that others wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import CheckpointError
from engine.memory.address_space import AddressSpace
from engine.model import files
from engine.model.files import read_json
from tests.memory.test_address_space import limit_of


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    with limit_of(AddressSpace.read().mapped + (32 << 20)):
        assert read_json(tmp_path / "config.json") == {"a": 1}


@pytest.mark.parametrize("size", [8, 100, (1 << 20) + 5])
def test_a_file_that_is_too_large_is_refused(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    monkeypatch.setattr(files, "LARGEST_JSON", size)
    file.write_text("{}".ljust(size))
    assert read_json(file) == {}
    file.write_text("{}".ljust(size + 1))
    with pytest.raises(CheckpointError, match=r"config\.json: larger than \d+ MiB"):
        read_json(file)
