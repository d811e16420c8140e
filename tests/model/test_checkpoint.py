"""Damaged and hostile checkpoints end in one line that names the file and the tensor or field."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import CheckpointError, UnsupportedModelError, VtserveError
from engine.model import files
from engine.model.checkpoint import Checkpoint
from engine.model.quantization.read_declaration import read_declaration
from engine.model.read_config import read_model_config
from engine.model.registry import model_class
from tests.model.checkpoint_files import (
    CONFIG,
    NVFP4_GROUP,
    Tensors,
    float32,
    read_tensors,
    write_file,
    write_model,
    write_tensors,
)

FUZZ = [HealthCheck.function_scoped_fixture]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(shared_checkpoints: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(shared_checkpoints / "qwen2" / "NVFP4-modelopt", tmp_path / "model"))


def refuse(model: Path, kind: type[Exception] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        Checkpoint.open(model)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < len(str(model)) + 600
    return said


def test_a_checkpoint_says_what_it_holds(model: Path) -> None:
    with Checkpoint.open(model) as checkpoint:
        tensors = read_tensors(model)
        assert set(checkpoint.tensors) == set(tensors)
        assert checkpoint.nbytes == sum(len(data) for _, _, data in tensors.values())
        assert checkpoint.largest_tensor == max(len(data) for _, _, data in tensors.values())
        assert checkpoint.has_fp8_kv_cache
        assert "model.embed_tokens.weight" in checkpoint
        assert "lm_head.weight" not in checkpoint
        below = checkpoint.below("model.layers.0.mlp.up_proj")
        assert {name.rpartition(".")[2] for name in below} == {
            *("weight", "weight_scale", "weight_scale_2", "input_scale"),
        }
        with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is missing"):
            checkpoint.tensor("lm_head.weight")


def test_views_outlive_the_checkpoint(model: Path) -> None:
    with Checkpoint.open(model) as checkpoint:
        view = checkpoint.tensor("model.norm.weight")
        copy = view.copy()
        checkpoint.release("model.norm.weight")
    checkpoint.close()
    np.testing.assert_array_equal(view, copy)
    assert not view.flags.writeable


# -- shards ------------------------------------------------------------------------------------------------


def shard(model: Path, held: dict[str, Tensors], index: Any) -> Path:
    for file, tensors in held.items():
        write_tensors(model / file, tensors)
    (model / "model.safetensors").unlink(missing_ok=True)
    (model / INDEX).write_text(json.dumps(index))
    return model


def test_shards_are_one_checkpoint(model: Path) -> None:
    tensors = read_tensors(model)
    names = sorted(tensors)
    held = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    index = {"weight_map": {name: file for file, part in held.items() for name in part}}
    shard(model, {file: {n: tensors[n] for n in part} for file, part in held.items()}, index)
    checkpoint = Checkpoint.open(model)
    assert set(checkpoint.tensors) == set(names)
    for name in names:
        assert checkpoint.tensor(name).tobytes() == tensors[name][2]


def test_an_index_is_read_before_a_single_file(model: Path) -> None:
    write_tensors(model / "a.safetensors", {"x": float32(1.0)})
    (model / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert set(Checkpoint.open(model).tensors) == {"x"}


def test_the_index_decides_between_shards(tmp_path: Path) -> None:
    """A tensor in two of them, and one that the index does not name."""
    model = write_model(tmp_path / "m")
    held = {
        "a.safetensors": {"x": float32(1.0), "y": float32(2.0)},
        "b.safetensors": {"x": float32(3.0), "unnamed": float32(4.0)},
    }
    shard(model, held, {"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}})
    checkpoint = Checkpoint.open(model)
    assert {name: float(checkpoint.tensor(name)) for name in checkpoint.tensors} == {
        "x": 3.0,
        "y": 2.0,
        "unnamed": 4.0,
    }


@pytest.mark.parametrize(
    "file",
    [
        *("../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\0b", 3, None, ["a"]),
        "gone.safetensors",
    ],
)
def test_an_index_names_files_of_its_directory_only(model: Path, file: Any) -> None:
    (model / INDEX).write_text(json.dumps({"weight_map": {"x": file}}))
    said = refuse(model)
    assert "expected the name of a file beside it" in said or "is missing" in said
    assert "passwd: " not in said, "it is not even opened"


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}])
def test_an_index_without_a_map(model: Path, index: Any) -> None:
    (model / INDEX).write_text(json.dumps(index))
    assert f"{INDEX}: weight_map: expected an object" in refuse(model)


def test_a_tensor_that_is_not_in_its_shard(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    shard(model, {"a.safetensors": {"x": float32(1.0)}}, {"weight_map": {"y": "a.safetensors"}})
    assert f"a.safetensors: tensor y is missing, but {INDEX} places it here" in refuse(model)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    held = {"a.safetensors": {"x": float32(1.0)}, "b.safetensors": {"y": float32(1.0)}}
    shard(model, held, {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    write_file(model / "b.safetensors", b"{", b"")
    assert "b.safetensors: not a sound safetensors file" in refuse(model)


# -- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 7, 100, 5000])
def test_a_truncated_file_is_refused(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors: not a sound safetensors file" in refuse(model)


def test_missing_files_are_named(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert f"model.safetensors: no such file, nor {INDEX}" in refuse(model)
    (model / "config.json").unlink()
    assert "config.json: no such file" in refuse(model)
    assert "config.json: no such file" in refuse(model / "nowhere")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JSON"),
        (b"[1]", "expected a JSON object, found [1]"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": ' * 100_000, "not JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"architectures": ["\\n\\u001b[31m"]}', ""),
        (b"{} " * 9, "not JSON"),
    ],
)
def test_a_config_that_is_none(model: Path, data: bytes, said: str) -> None:
    (model / "config.json").write_bytes(data)
    assert f"config.json: {said}" in refuse(model)
    assert "\x1b" not in refuse(model)


def test_a_very_large_config_is_not_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_JSON", 1 << 20)
    (model / "config.json").write_bytes(b" " * (2 << 20))
    assert "config.json: larger than 1 MiB" in refuse(model)


def test_a_pipe_is_not_waited_for(model: Path) -> None:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert "config.json: expected a file, found something else" in refuse(model)


def test_a_faulty_generation_config_is_named(model: Path) -> None:
    (model / "generation_config.json").write_text("{")
    assert "generation_config.json: not JSON" in refuse(model)
    (model / "generation_config.json").unlink()
    assert Checkpoint.open(model).config.vocab_size == 512


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"architectures: 'GPT2LMHeadModel' is not served"):
        model_class("GPT2LMHeadModel")


# -- anything ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=FUZZ)
@given(data=st.binary(max_size=300))
def test_any_bytes_are_an_error_of_ours(model: Path, data: bytes) -> None:
    for name in ("config.json", "model.safetensors"):
        sound = (model / name).read_bytes()
        (model / name).write_bytes(data)
        assert name in refuse(model, VtserveError)
        (model / name).write_bytes(sound)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_an_absurd_field_is_named_or_accepted(data: st.DataObject) -> None:
    field = data.draw(
        st.sampled_from(
            [*CONFIG, "rope_scaling", "rope_parameters", "head_dim", "eos_token_id", "layer_types"]
        )
    )
    raw = {**CONFIG, field: data.draw(JSON)}
    said = ""
    try:
        config = read_model_config(raw, {}, source="config.json")
    except CheckpointError as error:
        said = str(error)
    if said:
        assert said.startswith("config.json: ")
        assert "\n" not in said
    else:
        assert config.num_heads % config.num_kv_heads == 0


MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 16}},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    "ignore": ["lm_head"],
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": NVFP4_GROUP},
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    "ignore": ["re:.*lm_head"],
    "sparsity_config": {},
}


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_an_absurd_quantisation_is_named_or_accepted(data: st.DataObject) -> None:
    sound: dict[str, Any] = json.loads(json.dumps(data.draw(st.sampled_from([MODELOPT, COMPRESSED]))))
    place = sound
    while True:
        field = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[field], dict) or not place[field] or data.draw(st.booleans()):
            break
        place = place[field]
    place[field] = data.draw(JSON)
    said, formats = "", None
    try:
        declaration = read_declaration(Path("nowhere"), {"quantization_config": sound})
        formats = {declaration.format_of(name) for name in ("a", "lm_head", "model.layers.0.mlp.up_proj")}
    except CheckpointError as error:
        said = str(error)
    if formats is None:
        assert said.startswith("nowhere/config.json: ")
        assert "\n" not in said
