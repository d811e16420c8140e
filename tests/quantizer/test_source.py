"""Sources that can be quantised, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.errors import CheckpointError, UnsupportedModelError
from engine.quantizer.source import Source
from tests.checkpoints import CHECKPOINTS

CONFIG: dict[str, Any] = json.loads((CHECKPOINTS / "llama-tied" / "bf16" / "config.json").read_text())


def make(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, path / "model.safetensors")
    return path


def test_stacks_are_what_engines_stack() -> None:
    stacks = [stack.modules for stack in Source(CHECKPOINTS / "qwen3" / "bf16").stacks()]
    expected = []
    for layer in ("model.layers.0", "model.layers.1"):
        expected += [
            (f"{layer}.mlp.down_proj",),
            (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
            (f"{layer}.self_attn.o_proj",),
            tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv"),
        ]
    assert sorted(stacks) == sorted(expected)


def test_layers_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.mlp.down_proj.weight": np.zeros((2, 16), np.float32) for i in (10, 9, 0)}
    stacks = Source(make(tmp_path, tensors)).stacks()
    assert [stack.modules[0].split(".")[2] for stack in stacks] == ["0", "9", "10"]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_reads_16_and_32_bit_floats(tmp_path: Path, dtype: type) -> None:
    values = np.random.default_rng(0).standard_normal((3, 16)).astype(dtype)
    source = Source(make(tmp_path, {"model.layers.0.mlp.up_proj.weight": values}))
    np.testing.assert_array_equal(source.weight("model.layers.0.mlp.up_proj"), values.astype(np.float32))
    assert source.bfloat16("model.layers.0.mlp.up_proj.weight").dtype == ml_dtypes.bfloat16
    assert source.parameters == 48


@pytest.mark.parametrize(
    "model", ["llama-tied/NVFP4-modelopt", "llama-tied/NVFP4A16-ct", "llama-mixed/MIXED-modelopt"]
)
def test_quantised_models_are_refused(model: str) -> None:
    with pytest.raises(UnsupportedModelError, match="is quantised already"):
        Source(CHECKPOINTS / model)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        Source(tmp_path)
    make(tmp_path, {"a": np.zeros(3, np.int32)})
    with pytest.raises(UnsupportedModelError, match="tensor a is I32; expected BF16, F16 or F32"):
        Source(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a sound safetensors file"):
        Source(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["GPT2LMHeadModel"]}))
    make_weights(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'GPT2LMHeadModel' is not served"):
        Source(tmp_path)


def make_weights(path: Path) -> None:
    save_file({"model.norm.weight": np.zeros(3, np.float32)}, path / "model.safetensors")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, value: float) -> None:
    weight = np.zeros((2, 16), np.float32)
    weight[1, 3] = value
    source = Source(make(tmp_path, {"model.layers.0.mlp.up_proj.weight": weight}))
    with pytest.raises(
        CheckpointError, match=r"tensor model\.layers\.0\.mlp\.up_proj\.weight holds infinities or NaN"
    ):
        source.weight("model.layers.0.mlp.up_proj")


def test_companions_are_the_tokenizers_files() -> None:
    names = {path.name for path in Source(CHECKPOINTS / "qwen3" / "bf16").companions()}
    assert names == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
