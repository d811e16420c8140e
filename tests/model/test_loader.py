"""What is warned of in a load, and which bytes are on the device after it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backend.cpu import CpuBackend
from engine.errors import CheckpointError
from engine.memory.resources import HostMemoryResource
from engine.model.checkpoint import Checkpoint
from engine.model.llama import Llama
from engine.model.loader import WeightLoader
from tests.model.checkpoint_files import (
    NVFP4_GROUP,
    bfloat16,
    dense,
    float32,
    fp8_linear,
    modelopt_nvfp4,
    read_tensors,
    write_model,
)

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


class Load:
    """A model on the CPU backend: its bytes, and what was said."""

    def __init__(self, model: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.clear()
        self.progress: list[tuple[str, int, int]] = []
        memory = HostMemoryResource(1 << 24)
        backend = CpuBackend(memory, threads=1)
        with caplog.at_level(logging.INFO, logger="vtserve"), Checkpoint.open(model) as checkpoint:
            self.total = checkpoint.nbytes
            before = memory.live
            loader = WeightLoader(
                checkpoint, checkpoint.config, backend, progress=lambda *told: self.progress.append(told)
            )
            built = Llama(checkpoint.config, loader, backend)
            self.bytes = memory.live - before
            self.kv_scales = [loader.kv_scales(layer) for layer in range(checkpoint.config.num_layers)]
        self.warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        self.told = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
        del built
        backend.close()
        assert memory.live == 0


def test_a_sound_checkpoint_is_loaded_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{name}": float32(0.5)
        for layer in range(2)
        for name in ("k_proj.k_scale", "v_proj.v_scale")
    }
    model = write_model(
        tmp_path / "m", {"quantization_config": MODELOPT}, linear=lambda _: modelopt_nvfp4, more=scales
    )
    load = Load(model, caplog)
    assert load.warnings == []
    assert load.kv_scales == [(0.5, 0.5)] * 2
    assert any("4 scales of the FP8 KV cache were loaded" in line for line in load.told)


def test_progress_ends_with_all_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load = Load(write_model(tmp_path / "m"), caplog)
    labels, done, totals = zip(*load.progress, strict=True)
    assert set(labels) == {"load"}
    assert set(totals) == {load.total}
    assert list(done) == sorted(done)
    assert done[-1] == load.total


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({**MODELOPT, "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "'num_bits': 4"),
        ({**MODELOPT, "kv_cache_quant_algo": "NVFP4"}, "'NVFP4'"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": NVFP4_GROUP},
                "kv_cache_scheme": {"num_bits": 8, "type": "int", "strategy": "tensor"},
            },
            "'type': 'int'",
        ),
    ],
)
def test_a_cache_format_that_is_not_served_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, quantization: dict[str, Any], said: str
) -> None:
    model = write_model(
        tmp_path / "m", {"quantization_config": quantization}, linear=lambda _: modelopt_nvfp4
    )
    load = Load(model, caplog)
    (warning,) = [line for line in load.warnings if "is not served" in line]
    assert said in warning
    assert "config.json: a KV cache in " in warning


def test_what_is_stored_otherwise_than_declared_is_said_once_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = "model.layers.1.mlp.down_proj"
    model = write_model(
        tmp_path / "m",
        {"quantization_config": MODELOPT},
        linear=lambda module: dense if module == kept else modelopt_nvfp4,
    )
    (warning,) = [line for line in Load(model, caplog).warnings if "disagrees" in line]
    assert f"{kept} is BF16, declared NVFP4" in warning
    assert "more" not in warning


def test_many_disagreements_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_model(
        tmp_path / "m",
        {"quantization_config": {**MODELOPT, "ignore": ["*self_attn*"]}},
        linear=lambda module: fp8_linear if "attn" in module else modelopt_nvfp4,
    )
    (warning,) = [line for line in Load(model, caplog).warnings if "disagrees" in line]
    assert "q_proj is FP8, declared BF16" in warning
    assert warning.endswith(", and 4 more")


@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8"])
def test_a_declared_format_that_nothing_is_stored_in_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, algorithm: str
) -> None:
    model = write_model(
        tmp_path / "m", {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm}}
    )
    expected = rf"declares {algorithm}, but tensor model\.layers\.0\.self_attn\.q_proj\.weight_scale is"
    with pytest.raises(CheckpointError, match=expected):
        Load(model, caplog)


def test_tensors_without_a_use_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = {
        "model.layers.2.mlp.up_proj.weight": bfloat16(np.zeros((48, 32))),
        "visual.patch.weight": bfloat16(np.zeros(3)),
        # Old checkpoints hold what follows from rope_theta.
        "model.layers.0.self_attn.rotary_emb.inv_freq": float32(np.ones(4)),
    }
    load = Load(write_model(tmp_path / "m", more=more), caplog)
    (warning,) = [line for line in load.warnings if "no use" in line]
    assert "2 tensors: model.layers.2.mlp.up_proj.weight, visual.patch.weight" in warning


# -- tied and untied ---------------------------------------------------------------------------------------


def with_head(directory: Path, config: dict[str, Any], change: float) -> Path:
    """A second table whose last element differs from the first's by `change`."""
    model = write_model(directory, config)
    dtype, shape, data = read_tensors(model)["model.embed_tokens.weight"]
    values = np.frombuffer(data, np.uint16).copy()
    values[-1] ^= int(change)
    return write_model(directory, config, more={"lm_head.weight": (dtype, shape, values.tobytes())})


def test_the_same_table_twice_is_loaded_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the configuration says of it."""
    tied = Load(write_model(tmp_path / "tied"), caplog)
    for name, config in (("true", {}), ("false", {"tie_word_embeddings": False})):
        load = Load(with_head(tmp_path / name, config, 0), caplog)
        assert load.bytes == tied.bytes
        assert [line for line in load.warnings if "KV" not in line] == []
        assert load.progress[-1][1] == load.total


def test_the_tensors_decide_whether_it_is_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tied = Load(write_model(tmp_path / "tied"), caplog)
    # Declared tied, and one bit of a head of its own says that it is not.
    untied = Load(with_head(tmp_path / "head", {"tie_word_embeddings": True}, 1), caplog)
    assert untied.bytes >= tied.bytes + 64 * 32 * 2
    # Nothing is declared, and there is no head.
    headless = Load(write_model(tmp_path / "headless", {"tie_word_embeddings": None}), caplog)
    assert headless.bytes == tied.bytes


def test_a_head_that_is_declared_and_missing_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The embedding in its place would load, and answer with nonsense."""
    model = write_model(tmp_path, {"tie_word_embeddings": False})
    said = r"config\.json: tie_word_embeddings is false, but tensor lm_head\.weight is missing$"
    with pytest.raises(CheckpointError, match=said):
        Load(model, caplog)


# -- scales of the cache -----------------------------------------------------------------------------------

ATTENTION = "model.layers.{}.self_attn"


def scales_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, tensors: dict[str, Any]) -> Load:
    return Load(write_model(tmp_path / "m", more=tensors), caplog)


@pytest.mark.parametrize("key", ["k_proj.k_scale", "k_scale"])
@pytest.mark.parametrize("value", ["v_proj.v_scale", "v_scale"])
def test_both_spellings(tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, value: str) -> None:
    """compressed-tensors often writes BF16 of one element."""
    tensors = {}
    for layer in range(2):
        tensors[f"{ATTENTION.format(layer)}.{key}"] = bfloat16(np.array([0.25 + layer]))
        tensors[f"{ATTENTION.format(layer)}.{value}"] = float32(2.0)
    load = scales_of(tmp_path, caplog, tensors)
    assert load.kv_scales == [(0.25, 2.0), (1.25, 2.0)]
    assert load.warnings == []


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_one_of_two_serves_both(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    tensors = {f"{ATTENTION.format(layer)}.{name}": float32(0.5) for layer in range(2)}
    assert scales_of(tmp_path, caplog, tensors).kv_scales == [(0.5, 0.5)] * 2


def test_none_is_said_once_for_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load = scales_of(tmp_path, caplog, {})
    assert load.kv_scales == [(1.0, 1.0)] * 2
    (warning,) = load.warnings
    assert warning.endswith("no scales for an FP8 KV cache; 1.0 is used for every layer")


def test_layers_without_any_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load = scales_of(tmp_path, caplog, {f"{ATTENTION.format(0)}.k_scale": float32(0.5)})
    assert load.kv_scales == [(0.5, 0.5), (1.0, 1.0)]
    (warning,) = load.warnings
    assert warning.endswith("1.0 is used for layers 1")


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (float32(0.0), "expected a positive number, found 0.0"),
        (float32(np.nan), "expected a positive number, found nan"),
        (float32(-2.0), "expected a positive number"),
        (float32(np.inf), "expected a positive number"),
        (("F64", (), np.float64(1e300).tobytes()), "expected a positive number, found inf"),
        (float32(np.ones(2)), r"expected one element \(per-tensor scale\), found shape \[2\]"),
        (("U8", (1,), b"\1"), "expected a float, found U8"),
    ],
)
def test_a_scale_is_a_positive_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: Any, said: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"tensor model\.layers\.0\.self_attn\.k_scale: {said}"):
        scales_of(tmp_path, caplog, {f"{ATTENTION.format(0)}.k_scale": stored})
