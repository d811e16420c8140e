"""Linear layers out of a checkpoint: by ml_dtypes' formats, and one test for each trap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from engine.backend.protocol import LinearSource, WeightFormat
from engine.errors import CheckpointError, UnsupportedModelError
from engine.model.checkpoint import Checkpoint
from engine.model.loader import WeightLoader
from engine.model.quantization.sources import linear_source, stored_format
from tests.model.checkpoint_files import (
    LINEARS,
    Make,
    Tensors,
    bfloat16,
    change_tensors,
    dense,
    e4m3,
    float32,
    fp8_linear,
    modelopt_nvfp4,
    read_tensors,
    uint8,
    write_model,
)

GATE = "model.layers.0.mlp.gate_proj"
SHAPE = (48, 32)


def compressed_nvfp4(rng: np.random.Generator, module: str, rows: int, cols: int) -> Tensors:
    """The same numbers as `modelopt_nvfp4` in compressed-tensors' names: a global scale to divide by."""
    tensors = modelopt_nvfp4(rng, module, rows, cols)
    return {
        f"{module}.weight_packed": tensors[f"{module}.weight"],
        f"{module}.weight_scale": tensors[f"{module}.weight_scale"],
        f"{module}.weight_global_scale": float32([1e4]),
        f"{module}.input_global_scale": float32([100.0]),
    }


def make_model(path: Path, linear: Make, change: Callable[[Tensors], object] = lambda tensors: None) -> Path:
    model = write_model(path / "m", linear=lambda module: linear)
    change_tensors(model, change)
    return model


def source_of(model: Path, module: str = GATE, shape: tuple[int, int] = SHAPE) -> LinearSource:
    return linear_source(Checkpoint.open(model), module, *shape)


def values_of(source: LinearSource) -> np.ndarray:
    """float64 [N, K], by ml_dtypes alone."""
    if source.format is WeightFormat.BF16:
        return source.weight.view(ml_dtypes.bfloat16).astype(np.float64)
    if source.format is WeightFormat.FP8:
        return source.weight.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * source.global_scale
    assert source.group_scales is not None
    codes = np.stack([source.weight & 15, source.weight >> 4], axis=-1).reshape(source.shape)
    elements = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = source.group_scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return elements * scales.repeat(16, axis=1) * source.global_scale


# -- NVFP4 -------------------------------------------------------------------------------------------------


def test_both_conventions_give_the_same_numbers(tmp_path: Path) -> None:
    """ModelOpt's global scale multiplies, compressed-tensors' divides."""
    ours, theirs = (
        source_of(make_model(tmp_path / make.__name__, make)) for make in (modelopt_nvfp4, compressed_nvfp4)
    )
    for source in (ours, theirs):
        assert source.format is WeightFormat.NVFP4
        assert source.global_scale == pytest.approx(1e-4, rel=1e-6)
    np.testing.assert_allclose(values_of(theirs), values_of(ours), rtol=1e-6)
    assert np.abs(values_of(ours)).max() < 6 * 448 * 1e-4


def test_two_tools_say_nearly_the_same_of_one_model(shared_checkpoints: Path) -> None:
    """ModelOpt's and llm-compressor's scales for the same weights."""
    rows, cols = 256, 128
    bf16, *others = (
        values_of(source_of(shared_checkpoints / "llama-untied" / name, shape=(rows, cols)))
        for name in ("bf16", "NVFP4-modelopt", "NVFP4A16-ct", "NVFP4-FP8KV-ct")
    )
    for values in others:
        assert np.abs(values - bf16).mean() < 0.15 * np.abs(bf16).mean()


def test_bytes_are_handed_on_as_they_are(tmp_path: Path) -> None:
    """Subnormal group scales among them: converting them could flush them to zero."""
    tiny = np.full((48, 2), 2.0**-9)
    tiny[::2] = 7 * 2.0**-9

    def change(tensors: Tensors) -> None:
        tensors[f"{GATE}.weight_scale"] = e4m3(tiny)

    model = make_model(tmp_path, modelopt_nvfp4, change)
    source, tensors = source_of(model), read_tensors(model)
    assert source.group_scales is not None
    assert source.weight.tobytes() == tensors[f"{GATE}.weight"][2]
    assert source.group_scales.tobytes() == tensors[f"{GATE}.weight_scale"][2]
    assert set(np.unique(source.group_scales)) == {1, 7}
    assert not source.weight.flags.writeable
    assert not source.weight.flags.owndata


def test_partitions_keep_their_own_global_scales(tmp_path: Path) -> None:
    """Taking the largest for all of q, k and v is off by as much as they differ."""
    attention = "model.layers.0.self_attn"
    scales = {"q_proj": 1e-4, "k_proj": 2.14e-4, "v_proj": 5e-5}

    def change(tensors: Tensors) -> None:
        for name, scale in scales.items():
            tensors[f"{attention}.{name}.weight_scale_2"] = float32(scale)

    handed: list[list[LinearSource]] = []

    class Backend:
        def load_linear(self, parts: list[LinearSource]) -> None:
            handed.append(list(parts))

    checkpoint = Checkpoint.open(make_model(tmp_path, modelopt_nvfp4, change))
    backend: Any = Backend()
    loader = WeightLoader(checkpoint, checkpoint.config, backend)
    modules = [f"{attention}.{name}" for name in scales]
    loader.linear("qkv", modules, [LINEARS[f"self_attn.{name}"][0] for name in scales], 32)
    (parts,) = handed
    assert [part.global_scale for part in parts] == [np.float32(scale) for scale in scales.values()]
    assert [part.shape for part in parts] == [(32, 32), (16, 32), (16, 32)]


@pytest.mark.parametrize("make", [modelopt_nvfp4, compressed_nvfp4])
@pytest.mark.parametrize("which", ["weight_scale", "global"])
def test_a_missing_scale_is_refused_by_name(tmp_path: Path, make: Make, which: str) -> None:
    """Not read as whatever lies in memory."""
    if which == "global":
        which = "weight_scale_2" if make is modelopt_nvfp4 else "weight_global_scale"
    model = make_model(tmp_path, make, lambda tensors: tensors.pop(f"{GATE}.{which}"))
    with pytest.raises(CheckpointError, match=rf"tensor {GATE}\.{which} is missing"):
        source_of(model)


@pytest.mark.parametrize(
    ("make", "name"), [(modelopt_nvfp4, "weight_scale_2"), (compressed_nvfp4, "weight_global_scale")]
)
@pytest.mark.parametrize("value", [0.0, -1e-4, np.nan, np.inf, -np.inf])
def test_a_global_scale_is_a_positive_number(tmp_path: Path, make: Make, name: str, value: float) -> None:
    model = make_model(tmp_path, make, lambda t: t.update({f"{GATE}.{name}": float32(value)}))
    with pytest.raises(CheckpointError, match=rf"tensor {GATE}\.{name}: expected a positive number"):
        source_of(model)


def test_a_divisor_has_a_reciprocal(tmp_path: Path) -> None:
    tiny = float32(1e-45)
    model = make_model(tmp_path, compressed_nvfp4, lambda t: t.update({f"{GATE}.weight_global_scale": tiny}))
    with pytest.raises(CheckpointError, match="weight_global_scale: expected a number with a reciprocal"):
        source_of(model)


@pytest.mark.parametrize("code", [0x7F, 0x80, 0xB8, 0xFF])
def test_group_scales_are_no_nan_and_not_negative(tmp_path: Path, code: int) -> None:
    def change(tensors: Tensors) -> None:
        dtype, shape, data = tensors[f"{GATE}.weight_scale"]
        tensors[f"{GATE}.weight_scale"] = dtype, shape, data[:-1] + bytes([code])

    with pytest.raises(CheckpointError, match=r"weight_scale: expected numbers from 0 to 448"):
        source_of(make_model(tmp_path, modelopt_nvfp4, change))


@pytest.mark.parametrize(
    ("name", "stored", "said"),
    [
        ("weight", uint8(np.zeros((48, 32))), r"expected shape \[48, 16\] by config.json, found \[48, 32\]"),
        ("weight", uint8(np.zeros((32, 16))), r"expected shape \[48, 16\]"),
        ("weight_scale", e4m3(np.ones((48, 1))), r"expected shape \[48, 2\] by config.json, found \[48, 1\]"),
        ("weight_scale", bfloat16(np.ones((48, 2))), r"expected F8_E4M3, found BF16"),
        ("weight_scale", uint8(np.ones((48, 2))), r"expected F8_E4M3, found U8"),
        ("weight_scale_2", float32(np.ones(3)), r"expected one element \(per-tensor scale\)"),
    ],
)
def test_shapes_and_types_that_contradict(tmp_path: Path, name: str, stored: Any, said: str) -> None:
    model = make_model(tmp_path, modelopt_nvfp4, lambda t: t.update({f"{GATE}.{name}": stored}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {GATE}\.{name}: {said}"):
        source_of(model)


def test_columns_come_in_whole_groups(tmp_path: Path) -> None:
    model = make_model(tmp_path, modelopt_nvfp4)
    with pytest.raises(UnsupportedModelError, match="40 columns; NVFP4 needs a multiple of 16"):
        source_of(model, shape=(48, 40))


# -- FP8 and dense -----------------------------------------------------------------------------------------


def test_fp8_per_tensor(tmp_path: Path) -> None:
    model = make_model(tmp_path, fp8_linear)
    source = source_of(model)
    assert source.format is WeightFormat.FP8
    assert source.group_scales is None
    _, _, data = read_tensors(model)[f"{GATE}.weight"]
    expected = np.frombuffer(data, ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(SHAPE) * 1e-3
    np.testing.assert_allclose(values_of(source), expected, rtol=1e-6)


def test_fp8_needs_its_scale(tmp_path: Path) -> None:
    model = make_model(tmp_path, fp8_linear, lambda tensors: tensors.pop(f"{GATE}.weight_scale"))
    with pytest.raises(CheckpointError, match=rf"tensor {GATE}\.weight_scale is missing"):
        source_of(model)


@pytest.mark.parametrize("shape", [(48,), (48, 1), (1, 1, 3)])
def test_fp8_per_channel_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    scales = float32(np.ones(shape))
    model = make_model(tmp_path, fp8_linear, lambda t: t.update({f"{GATE}.weight_scale": scales}))
    with pytest.raises(UnsupportedModelError, match=r"weight_scale: expected one element"):
        source_of(model)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_dense_weights_are_rounded_to_bfloat16(tmp_path: Path, dtype: str) -> None:
    values = np.random.default_rng(3).normal(0, 1, SHAPE)
    carrier: Any = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}[dtype]
    stored = values.astype(carrier)
    model = make_model(
        tmp_path, dense, lambda t: t.update({f"{GATE}.weight": (dtype, SHAPE, stored.tobytes())})
    )
    source = source_of(model)
    assert source.format is WeightFormat.BF16
    expected = stored.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(values_of(source), expected)


@pytest.mark.parametrize("dtype", ["F64", "I8", "I32", "F8_E5M2"])
def test_other_weights_are_refused(tmp_path: Path, dtype: str) -> None:
    size = {"F64": 8, "I8": 1, "I32": 4, "F8_E5M2": 1}[dtype]
    stored = dtype, SHAPE, bytes(48 * 32 * size)
    model = write_model(tmp_path / "m", more={f"{GATE}.weight": stored})
    with pytest.raises(UnsupportedModelError, match=rf"{GATE}\.weight: expected BF16, F16 or F32"):
        source_of(model)


def test_the_tensors_decide_the_format(tmp_path: Path) -> None:
    kinds: dict[str, Make] = {"gate_proj": modelopt_nvfp4, "up_proj": fp8_linear, "down_proj": dense}
    kinds["q_proj"] = compressed_nvfp4
    model = write_model(tmp_path / "m", linear=lambda module: kinds.get(module.rpartition(".")[2], dense))
    checkpoint = Checkpoint.open(model)
    found = {name: stored_format(checkpoint, f"model.layers.0.mlp.{name}") for name in list(kinds)[:3]}
    assert found == {
        "gate_proj": WeightFormat.NVFP4,
        "up_proj": WeightFormat.FP8,
        "down_proj": WeightFormat.BF16,
    }
    assert stored_format(checkpoint, "model.layers.0.self_attn.q_proj") is WeightFormat.NVFP4


@pytest.mark.parametrize(
    "suffix", ["pre_quant_scale", "weight_zero_point", "weight_g_idx", "lora_A", "svdquant_lora_a"]
)
def test_tensors_that_would_change_the_layer_are_refused(tmp_path: Path, suffix: str) -> None:
    more = {f"{GATE}.{suffix}": float32(np.ones(32))}
    model = make_model(tmp_path, modelopt_nvfp4, lambda tensors: tensors.update(more))
    with pytest.raises(UnsupportedModelError, match=rf"{GATE}\.{suffix}: a linear layer with {suffix}"):
        source_of(model)


def test_codes_with_a_scale_of_another_format_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path, dense, lambda t: t.update({f"{GATE}.weight_scale": float32(1.0)}))
    with pytest.raises(UnsupportedModelError, match=rf"{GATE}\.weight: BF16 with weight_scale is not served"):
        source_of(model)


# -- biases ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [modelopt_nvfp4, fp8_linear, dense])
def test_a_bias_is_read_in_any_format(tmp_path: Path, make: Make) -> None:
    values = np.linspace(-1, 1, 48)
    model = make_model(tmp_path, make, lambda t: t.update({f"{GATE}.bias": bfloat16(values)}))
    bias = source_of(model).bias
    assert bias is not None
    assert bias.dtype == np.float32
    np.testing.assert_array_equal(bias, values.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_a_bias_has_as_many_elements_as_rows(tmp_path: Path) -> None:
    model = make_model(tmp_path, dense, lambda t: t.update({f"{GATE}.bias": float32(np.ones(47))}))
    with pytest.raises(CheckpointError, match=r"gate_proj\.bias: expected shape \[48\].*found \[47\]"):
        source_of(model)


def test_qwen2_without_its_bias_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"architectures": ["Qwen2ForCausalLM"]})
    expected = r"self_attn\.q_proj\.bias is missing; Qwen2ForCausalLM has it by its config\.json"
    with pytest.raises(CheckpointError, match=expected):
        source_of(model, "model.layers.0.self_attn.q_proj", (32, 32))
    assert source_of(model, "model.layers.0.self_attn.o_proj", (32, 32)).bias is None
