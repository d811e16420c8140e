"""Damaged and hostile checkpoints end in one line that names the file and the tensor or field."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import CheckpointError, UnsupportedModelError, VtserveError
from engine.model.checkpoint import Checkpoint, resolve_model
from engine.model.quantization.sources import linear_source
from engine.model.read_config import read_model_config

GATE = "model.layers.0.mlp.gate_proj"


@pytest.fixture
def model(shared_checkpoints: Path, tmp_path: Path) -> Path:
    """A copy to damage: ModelOpt NVFP4, gate_proj [256, 128]."""
    return Path(shutil.copytree(shared_checkpoints / "qwen2" / "NVFP4-modelopt", tmp_path / "model"))


Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""name -> (safetensors' element type, shape, bytes)"""


def read_tensors(model: Path) -> Tensors:
    checkpoint = Checkpoint.open(model)
    return {
        name: (stored.dtype, stored.shape, checkpoint.tensor(name).tobytes())
        for name, stored in checkpoint.tensors.items()
    }


def write_tensors(file: Path, tensors: Tensors) -> None:
    """As the format's specification says: NumPy has no FP8, so the library's own writer cannot be used."""
    header, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    body = b"".join(data for _, _, data in tensors.values())
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def change_tensors(model: Path, change: Callable[[Tensors], object]) -> None:
    tensors = read_tensors(model)
    change(tensors)
    write_tensors(model / "model.safetensors", tensors)


def gate(model: Path) -> Any:
    return linear_source(Checkpoint.open(model), GATE, 256, 128)


def test_both_conventions_of_the_global_scale_are_multipliers(shared_checkpoints: Path) -> None:
    """ModelOpt multiplies by amax / 2688, compressed-tensors divides by 2688 / amax."""
    ours, theirs = (
        linear_source(Checkpoint.open(shared_checkpoints / "qwen3" / name), GATE, 256, 128)
        for name in ("NVFP4-modelopt", "NVFP4A16-ct")
    )
    assert ours.global_scale == pytest.approx(theirs.global_scale, rel=0.05)
    assert ours.global_scale < 1e-3


def test_shards_are_one_checkpoint(model: Path) -> None:
    tensors = read_tensors(model)
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        write_tensors(model / file, {name: tensors[name] for name in held})
    (model / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint.open(model)
    assert set(checkpoint.tensors) == set(names)
    for name in names:
        assert checkpoint.tensor(name).tobytes() == tensors[name][2]


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "gone.safetensors"])
def test_an_index_names_files_of_its_directory_only(model: Path, file: str) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": file}}))
    with pytest.raises(CheckpointError, match=r"expected the name of a file beside it|is missing"):
        Checkpoint.open(model)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_global_scale_must_be_a_positive_number(model: Path, value: float) -> None:
    stored = ("F32", (), np.float32(value).tobytes())
    change_tensors(model, lambda tensors: tensors.update({f"{GATE}.weight_scale_2": stored}))
    with pytest.raises(CheckpointError, match=rf"{GATE}.weight_scale_2: expected a positive number"):
        gate(model)


@pytest.mark.parametrize("suffix", ["weight", "weight_scale", "weight_scale_2"])
def test_a_missing_tensor_is_named(model: Path, suffix: str) -> None:
    change_tensors(model, lambda tensors: tensors.pop(f"{GATE}.{suffix}"))
    with pytest.raises(CheckpointError, match=rf"tensor {GATE}.{suffix} is missing"):
        gate(model)


def test_a_shape_that_contradicts_the_configuration_is_refused(model: Path) -> None:
    stored = ("F8_E4M3", (256, 4), bytes(1024))
    change_tensors(model, lambda tensors: tensors.update({f"{GATE}.weight_scale": stored}))
    with pytest.raises(CheckpointError, match=r"weight_scale: expected shape \[256, 8\].*found \[256, 4\]"):
        gate(model)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000])
def test_a_truncated_file_is_refused(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a sound safetensors file"):
        Checkpoint.open(model)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_any_bytes_are_a_checkpoint_or_an_error_of_ours(model: Path, data: bytes) -> None:
    for name in ("config.json", "model.safetensors"):
        sound = (model / name).read_bytes()
        (model / name).write_bytes(data)
        with pytest.raises(VtserveError) as caught:
            Checkpoint.open(model)
        assert "\n" not in str(caught.value).strip()
        assert name in str(caught.value)
        (model / name).write_bytes(sound)


JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_an_absurd_field_is_named_or_accepted(data: st.DataObject) -> None:
    sound = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
    }
    field = data.draw(st.sampled_from([*sound, "rope_scaling", "head_dim", "eos_token_id", "rms_norm_eps"]))
    raw = {**sound, field: data.draw(JSON)}
    said = ""
    try:
        config = read_model_config(raw, {}, source="config.json")
    except CheckpointError as error:
        said = str(error)
    if said:
        assert said.startswith("config.json: ")
    else:
        assert config.num_heads % config.num_kv_heads == 0


def test_both_spellings_of_rope() -> None:
    base = json.loads('{"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 8,'
                      '"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,'
                      '"max_position_embeddings": 8}')  # fmt: skip
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    old = {**base, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {**base, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    assert read_model_config(old, {}, source="").rope == read_model_config(new, {}, source="").rope
    with pytest.raises(UnsupportedModelError, match="rope_type: 'longrope'"):
        read_model_config({**base, "rope_scaling": {"type": "longrope"}}, {}, source="config.json")


def test_what_is_no_model_is_said() -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve_model("./nowhere")
