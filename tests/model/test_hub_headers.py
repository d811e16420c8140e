"""Headers by requests for ranges: of directories, of ids in the cache, and of ids that are not."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import CheckpointError
from engine.model.checkpoint import Checkpoint
from engine.model.headers import CheckpointHeaders
from engine.model.hub_headers import header_directory
from tests.model.checkpoint_files import (
    bfloat16,
    dense,
    modelopt_nvfp4,
    read_tensors,
    write_model,
    write_tensors,
)
from tests.model.fake_hub import serving

SCRIPT = """
import json, sys
from engine.errors import CheckpointError
from engine.model.headers import CheckpointHeaders
from engine.model.hub_headers import header_directory
try:
    with header_directory(sys.argv[1]) as directory:
        headers = CheckpointHeaders.open(directory)
        tables = ("lm_head.weight", "model.embed_tokens.weight")
        same = all(t in headers for t in tables) and headers.is_equal(*tables)
        tensors = {n: [t.dtype, t.shape, t.start, t.nbytes, t.file.name] for n, t in headers.tensors.items()}
        print(json.dumps([same, headers.declaration.fp8_kv_cache, tensors]))
    print(directory.exists())
except CheckpointError as error:
    sys.exit(f"refused: {error}")
"""


def files_of(model: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in model.iterdir()}


def described(model: Path) -> dict[str, list[Any]]:
    tensors = Checkpoint.open(model).tensors
    return {n: [t.dtype, list(t.shape), t.start, t.nbytes, t.file.name] for n, t in tensors.items()}


def sharded(model: Path) -> Path:
    """The model in two files and an index."""
    tensors = read_tensors(model)
    names = list(tensors)
    weight_map = {}
    for number, half in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        write_tensors(model / file, {name: tensors[name] for name in half})
        weight_map |= dict.fromkeys(half, file)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("repeated", [True, False])
def test_an_id_costs_its_headers_only(tmp_path: Path, shards: int, repeated: bool) -> None:
    rng = np.random.default_rng(7)
    # Tables large enough to be the most of the files.
    shape = {"vocab_size": 20_000, "hidden_size": 32}
    table = bfloat16(rng.normal(0, 0.05, (20_000, 32)))
    head = table if repeated else bfloat16(rng.normal(0, 0.05, (20_000, 32)))
    more = {"model.embed_tokens.weight": table, "lm_head.weight": head}
    model = write_model(tmp_path / "m", shape, linear=lambda module: modelopt_nvfp4, more=more)
    if shards == 2:
        sharded(model)
    with serving(files_of(model)) as hub:
        done = hub.run([sys.executable, "-c", SCRIPT, "owner/name"], tmp_path)
        assert done.returncode == 0, done.stderr
        same, fp8, tensors = json.loads(done.stdout.splitlines()[0])
        assert tensors == described(model)
        assert (same, fp8) == (repeated, False)
        assert hub.sent < 700_000, "of 2.6 MB"
        shards_asked = [path for path in hub.requests if path.endswith(".safetensors")]
        assert 1 <= len(shards_asked) <= 2 * shards + 8
    assert done.stdout.splitlines()[1] == "False", "nothing is left behind"


def test_what_is_in_the_cache_is_read_there(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", linear=lambda module: dense)
    with serving(files_of(model)) as hub:
        assert hub.resolve(tmp_path).returncode == 0
        hub.requests.clear()
        done = hub.run([sys.executable, "-c", SCRIPT, "owner/name"], tmp_path, HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stderr
        assert hub.requests == []
        assert done.stdout.splitlines()[1] == "True", "the cache stays"
        assert json.loads(done.stdout.splitlines()[0])[2] == described(model)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda files: {**files, "model.safetensors": b"\xff" * 500}, "not a sound safetensors file"),
        (lambda files: {**files, "model.safetensors": b"\x05"}, "not a sound safetensors file"),
        (
            lambda files: {**files, "model.safetensors": files["model.safetensors"][:-1]},
            "not a sound safetensors file",
        ),
        (lambda files: {"config.json": files["config.json"]}, "not fetched from the Hugging Face hub: "),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, damage: Any, said: str) -> None:
    model = write_model(tmp_path / "m", linear=lambda module: dense)
    with serving(damage(files_of(model))) as hub:
        done = hub.run([sys.executable, "-c", SCRIPT, "owner/name"], tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("refused: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_directory_is_itself(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", linear=lambda module: dense)
    with header_directory(str(model)) as directory:
        assert directory == model
    assert model.is_dir()
    shutil.rmtree(model)
    with pytest.raises(CheckpointError, match="no such directory"), header_directory(str(model)):
        pass


def test_headers_have_shapes_and_no_contents(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", linear=lambda module: modelopt_nvfp4)
    real, headers = Checkpoint.open(model), CheckpointHeaders.open(model)
    for name in real.tensors:
        view, zeros = real.tensor(name), headers.tensor(name)
        assert (zeros.shape, zeros.dtype) == (view.shape, view.dtype)
        assert not zeros.any()
        headers.release(name)
    assert not headers._files, "no file was mapped"
