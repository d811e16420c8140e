"""Checkpoints written in shards, and directories that appear complete or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from engine.errors import CheckpointError, ConfigurationError
from engine.quantizer import writer as writer_module
from engine.quantizer.writer import CheckpointWriter, new_directory
from tests.quantizer.test_nvfp4 import read_safetensors


def test_one_shard_is_a_single_file(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path) as writer:
        writer.add("a", np.arange(6, dtype=np.float32).reshape(2, 3))
        writer.add("scalar", np.array(2.5, np.float32))
        writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    tensors = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(tensors["a"], [[0, 1, 2], [3, 4, 5]])
    assert tensors["scalar"].shape == ()


def test_shards_are_bounded_numbered_and_indexed(tmp_path: Path) -> None:
    arrays = {f"t{i}": np.full(100, i, ml_dtypes.bfloat16) for i in range(7)}
    with CheckpointWriter(tmp_path, shard_bytes=500) as writer:
        for name, array in arrays.items():
            writer.add(name, array)
        writer.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    assert index["metadata"]["total_size"] == 7 * 200
    assert set(index["weight_map"]) == set(arrays)
    for name, array in arrays.items():
        stored = read_safetensors(tmp_path / index["weight_map"][name])
        np.testing.assert_array_equal(stored[name], array)


def test_a_tensor_larger_than_a_shard_is_a_shard(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, shard_bytes=10) as writer:
        for name in "abc":
            writer.add(name, np.zeros(100, np.uint8))
        writer.finish()
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3


def test_files_have_the_modes_of_other_files(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path) as writer:
        writer.add("a", np.zeros(1, np.uint8))
        writer.finish()
        writer.write_json("config.json", {})
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer_module, "save_file", full)

    def write() -> None:
        with new_directory(tmp_path / "out") as directory, CheckpointWriter(directory) as writer:
            writer.add("a", np.zeros(1, np.uint8))
            writer.finish()

    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_really_full_disk_is_one_line(tmp_path: Path) -> None:
    """/dev/full refuses every byte."""
    (tmp_path / "config.json").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be written: No space left on device"):
        CheckpointWriter(tmp_path).write_json("config.json", {"a": 1})


def test_directory_appears_when_the_block_ends(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with new_directory(out) as directory:
        (directory / "file").write_text("x")
        assert not out.exists()
    assert (out / "file").read_text() == "x"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with new_directory(tmp_path / "out") as directory:
            (directory / "file").write_text("x")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_kept_without_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "old").write_text("x")
    with pytest.raises(ConfigurationError, match="not empty; give --force"), new_directory(out):
        pass
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="is a file"), new_directory(tmp_path / "file", force=True):
        pass
    with new_directory(out, force=True) as directory:
        (directory / "new").write_text("y")
        assert (out / "old").exists(), "replaced at the end, not before"
    assert [path.name for path in out.iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


@pytest.mark.parametrize(
    ("held", "named"),
    [
        (["thesis.txt"], "no config.json"),
        (["config.json", "photos/", "a"], "photos"),
        (["photos/"], "photos"),
    ],
)
def test_only_a_checkpoint_is_replaced(tmp_path: Path, held: list[str], named: str) -> None:
    """A home directory given by mistake stays, with --force too."""
    out = tmp_path / "out"
    out.mkdir()
    for name in held:
        (out / name).mkdir() if name.endswith("/") else (out / name).write_text("x")
    message = f"--out {out}: is no checkpoint that could be replaced: it holds .*{named}"
    with pytest.raises(ConfigurationError, match=message), new_directory(out, force=True):
        pytest.fail("nothing may be written")
    assert sorted(path.name for path in out.iterdir()) == sorted(name.rstrip("/") for name in held)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to("real")
    with new_directory(tmp_path / "link", force=True) as directory:
        (directory / "new").write_text("y")
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_the_current_directory_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with new_directory(Path()) as directory:
        (directory / "new").write_text("y")
    assert (tmp_path / "here" / "new").exists()


def test_a_mount_point_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory can be renamed onto one."""
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "volume")
    with (
        pytest.raises(ConfigurationError, match="volume: is a mount point; expected a directory in it"),
        new_directory(tmp_path / "volume"),
    ):
        pytest.fail("nothing may be written")


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with new_directory(tmp_path / "out") as directory:
        (directory / "new").write_text("y")
    assert (tmp_path / "out" / "new").exists()


def test_a_killed_writer_leaves_no_directory(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from engine.quantizer.writer import new_directory\n"
        "with new_directory(Path(sys.argv[1])) as directory:\n"
        "    (directory / 'file').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], cwd=root, check=False)
    assert done.returncode == -9
    assert not (tmp_path / "out").exists()
    (left,) = tmp_path.glob(".out.partial-*")
    # The next writer knows that nobody is at it, and lets what others are at alone.
    (tmp_path / ".out.partial-notes").mkdir()
    (tmp_path / ".other.partial-00000000").mkdir()
    with new_directory(tmp_path / "out") as directory:
        assert not left.exists()
        with new_directory(tmp_path / "out"):
            assert directory.exists(), "its process lives"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out", ".out.partial-notes", ".other.partial-00000000"}


def test_a_file_system_without_locks_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(writer_module.fcntl, "flock", refuse)
    (tmp_path / ".out.partial-01234567").mkdir()
    with new_directory(tmp_path / "out") as directory:
        (directory / "new").write_text("y")
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.partial-01234567"}
