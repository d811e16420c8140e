"""Whole models through the quantiser: the checkpoints of other tools, and a GGUF."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize as quantize_ggml
from safetensors.numpy import save_file

from engine.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from engine.quantizer.modelopt import DEFAULT_INPUT_SCALE
from engine.quantizer.nvfp4 import NVFP4Weight, dequantize
from engine.quantizer.quantize import quantize_model
from engine.quantizer.source import Source
from tests.checkpoints import CHECKPOINTS
from tests.quantizer.gguf_files import random_weights, write_gguf
from tests.quantizer.small_disk import files_of_at_most
from tests.quantizer.test_nvfp4 import read_safetensors

TEXT = "The quick brown fox jumps over the lazy dog; 12 cats watch, and none of them says a word.\n" * 8
MODELS = ["llama-tied", "llama-untied", "llama3-rope", "qwen2", "qwen3"]


def nvfp4_of(tensors: dict[str, np.ndarray], module: str) -> NVFP4Weight:
    return NVFP4Weight(
        tensors[f"{module}.weight"],
        tensors[f"{module}.weight_scale"].view(np.uint8),
        float(tensors[f"{module}.weight_scale_2"]),
    )


@pytest.mark.parametrize("size", [10, 1000, 20_000])
@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_what_cannot_be_written_names_the_directory_and_leaves_nothing(
    tmp_path: Path, kind: str, size: int
) -> None:
    source = CHECKPOINTS / "llama-tied" / "bf16"
    if kind == "gguf":
        source = tmp_path / "model.gguf"
        write_gguf(source, random_weights(np.random.default_rng(0)))
    work = tmp_path / "work"
    said = rf"^{re.escape(str(work / 'out'))}: cannot be written: File too large$"
    with files_of_at_most(size), pytest.raises(CheckpointError, match=said):
        quantize_model(source, work / "out")
    assert list(work.iterdir()) == []


@pytest.mark.parametrize("calibration", [None, TEXT])
@pytest.mark.parametrize("model", MODELS)
def test_writes_what_modelopt_writes(tmp_path: Path, model: str, calibration: str | None) -> None:
    """The same tensors, types and shapes, the same declarations, and less error."""
    out = tmp_path / "out"
    report = quantize_model(CHECKPOINTS / model / "bf16", out, calibration=calibration)
    theirs = CHECKPOINTS / model / "NVFP4-modelopt"
    ours, reference = (read_safetensors(path / "model.safetensors") for path in (out, theirs))
    assert {n: (t.dtype, t.shape) for n, t in ours.items()} == {
        n: (t.dtype, t.shape) for n, t in reference.items()
    }
    for name in ("config.json", "hf_quant_config.json"):
        made, expected = (json.loads((path / name).read_text()) for path in (out, theirs))
        for content in (made, expected):
            content.get("quantization_config", content).pop("producer")
            content.pop("transformers_version", None)
        assert made == expected, name
    for path in (CHECKPOINTS / model / "bf16").glob("*"):
        if path.name not in ("config.json", "model.safetensors"):
            assert (out / path.name).read_bytes() == path.read_bytes()
    assert len(report.quantized) == 14
    assert report.excluded == []
    assert report.calibration_tokens == (0 if calibration is None else report.calibration_tokens) >= 0
    original = read_safetensors(CHECKPOINTS / model / "bf16" / "model.safetensors")
    for name, values in original.items():
        if name in ours and ours[name].dtype == ml_dtypes.bfloat16:
            np.testing.assert_array_equal(ours[name], values)


@pytest.mark.parametrize("model", MODELS)
def test_stacks_share_scales_and_kv_scales_are_near_modelopts(tmp_path: Path, model: str) -> None:
    quantize_model(CHECKPOINTS / model / "bf16", tmp_path / "out", calibration=TEXT)
    tensors = read_safetensors(tmp_path / "out" / "model.safetensors")
    theirs = read_safetensors(CHECKPOINTS / model / "NVFP4-modelopt" / "model.safetensors")
    for layer in ("model.layers.0", "model.layers.1"):
        for kind in ("weight_scale_2", "input_scale"):
            assert len({float(tensors[f"{layer}.self_attn.{name}_proj.{kind}"]) for name in "qkv"}) == 1
            assert len({float(tensors[f"{layer}.mlp.{name}_proj.{kind}"]) for name in ("gate", "up")}) == 1
        for name in ("k_proj.k_scale", "v_proj.v_scale"):
            ours, reference = (float(t[f"{layer}.self_attn.{name}"]) for t in (tensors, theirs))
            assert reference / 2 < ours < reference * 2, "other texts, the same random model"
        assert tensors[f"{layer}.mlp.down_proj.input_scale"] != np.float32(DEFAULT_INPUT_SCALE)


def test_without_a_text_scales_of_what_was_not_seen_are_neutral(tmp_path: Path) -> None:
    quantize_model(CHECKPOINTS / "llama-tied" / "bf16", tmp_path / "out")
    tensors = read_safetensors(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.self_attn.k_proj.k_scale"] == 1
    assert tensors["model.layers.1.self_attn.v_proj.v_scale"] == 1
    assert tensors["model.layers.1.mlp.up_proj.input_scale"] == np.float32(DEFAULT_INPUT_SCALE)


def test_the_same_text_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        quantize_model(CHECKPOINTS / "qwen3" / "bf16", tmp_path / name, calibration=TEXT)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("calibration", [None, TEXT])
def test_other_float_types_give_nearly_the_same(tmp_path: Path, dtype: type, calibration: str | None) -> None:
    source = tmp_path / "source"
    shutil.copytree(CHECKPOINTS / "llama-untied" / "bf16", source)
    (source / "model.safetensors").chmod(0o644)
    tensors = read_safetensors(source / "model.safetensors")
    source.chmod(0o755)
    save_file({name: values.astype(dtype) for name, values in tensors.items()}, source / "model.safetensors")
    assert {t.dtype for t in Source(source).tensors.values()} == {"F16" if dtype is np.float16 else "F32"}
    quantize_model(source, tmp_path / "other", calibration=calibration)
    quantize_model(CHECKPOINTS / "llama-untied" / "bf16", tmp_path / "bf16", calibration=calibration)
    other, bf16 = (read_safetensors(tmp_path / name / "model.safetensors") for name in ("other", "bf16"))
    assert other["lm_head.weight"].dtype == ml_dtypes.bfloat16
    for layer in ("model.layers.0", "model.layers.1"):
        module = f"{layer}.mlp.down_proj"
        a, b = (dequantize(nvfp4_of(t, module)) for t in (other, bf16))
        weight = tensors[f"{module}.weight"].astype(np.float32)
        assert np.linalg.norm(a - weight) == pytest.approx(np.linalg.norm(b - weight), rel=0.05)
        if dtype is np.float32:
            np.testing.assert_array_equal(a, b)


def test_shards_are_written_and_read(tmp_path: Path) -> None:
    quantize_model(CHECKPOINTS / "llama-untied" / "bf16", tmp_path / "one")
    quantize_model(CHECKPOINTS / "llama-untied" / "bf16", tmp_path / "many", shard_bytes=100_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    single = read_safetensors(tmp_path / "one" / "model.safetensors")
    assert set(index["weight_map"]) == set(single)
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(read_safetensors(tmp_path / "many" / file)[name], single[name])


def test_a_sharded_source_is_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    original = CHECKPOINTS / "llama-untied" / "bf16"
    for path in original.glob("*.json"):
        shutil.copyfile(path, source / path.name)
    tensors = read_safetensors(original / "model.safetensors")
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, source / file)
    weight_map = {name: file for file, some in files.items() for name in some}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    quantize_model(source, tmp_path / "sharded", calibration=TEXT)
    quantize_model(original, tmp_path / "single", calibration=TEXT)
    a, b = (read_safetensors(tmp_path / name / "model.safetensors") for name in ("sharded", "single"))
    assert set(a) == set(b)
    for name, values in a.items():
        np.testing.assert_array_equal(values, b[name], err_msg=name)


def test_inputs_in_no_whole_groups_stay_in_bf16(tmp_path: Path) -> None:
    """A model whose MLP is 24 wide: down_proj cannot be quantised."""
    weights = random_weights(np.random.default_rng(0))
    source = tmp_path / "source"
    source.mkdir()
    tensors = {}
    for name, values in weights.items():
        cut = (
            values[:24]
            if "gate_proj" in name or "up_proj" in name
            else values[:, :24]
            if "down_proj" in name
            else values
        )
        tensors[name] = np.ascontiguousarray(cut.astype(ml_dtypes.bfloat16))
    save_file(tensors, source / "model.safetensors")
    write_gguf(tmp_path / "m.gguf", weights)
    quantize_model(tmp_path / "m.gguf", tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config | {"intermediate_size": 24}))
    shutil.copyfile(tmp_path / "whole" / "tokenizer.json", source / "tokenizer.json")
    kept = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    for name, calibration in (("plain", None), ("calibrated", TEXT)):
        report = quantize_model(source, tmp_path / name, calibration=calibration)
        assert report.excluded == kept
        made = read_safetensors(tmp_path / name / "model.safetensors")
        assert made[f"{kept[0]}.weight"].dtype == ml_dtypes.bfloat16
        assert f"{kept[0]}.weight_scale" not in made
        declared = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        assert declared["ignore"][-2:] == kept
        listed = json.loads((tmp_path / name / "hf_quant_config.json").read_text())["quantization"]
        assert listed["exclude_modules"] == declared["ignore"]


def test_a_gguf_becomes_a_whole_checkpoint(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_weights(np.random.default_rng(0)))
    told: list[tuple[str, int, int]] = []
    report = quantize_model(
        tmp_path / "m.gguf",
        tmp_path / "out",
        calibration=TEXT,
        progress=lambda label, done, total: told.append((label, done, total)),
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert report.calibration_tokens > 500
    assert report.nbytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert report.parameters == sum(v.size for v in random_weights(np.random.default_rng(0)).values())
    assert told[-1][0] == "quantize"
    assert told[-1][1] == told[-1][2]
    assert "model.layers.0.mlp.down_proj.weight_scale" in load_names(tmp_path / "out")


def load_names(path: Path) -> set[str]:
    return set(read_safetensors(path / "model.safetensors"))


def test_what_cannot_be_quantised_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="is quantised already"):
        quantize_model(CHECKPOINTS / "llama-tied" / "NVFP4-modelopt", tmp_path / "out")
    with pytest.raises(
        ConfigurationError, match="--calibration: a calibration text needs at least two tokens"
    ):
        quantize_model(CHECKPOINTS / "llama-tied" / "bf16", tmp_path / "out", calibration="")
    source = tmp_path / "source"
    shutil.copytree(CHECKPOINTS / "llama-tied" / "bf16", source)
    source.chmod(0o755)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").chmod(0o644)
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UnsupportedModelError, match="'GPT2LMHeadModel' is not served"):
        quantize_model(source, tmp_path / "out")
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file_bytes(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    (source / "model.safetensors").chmod(0o644)
    save_file(tensors, source / "model.safetensors")
    for calibration in (None, TEXT):
        with pytest.raises(
            CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds infinities or NaN"
        ):
            quantize_model(source, tmp_path / "out", calibration=calibration)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def load_file_bytes(path: Path) -> dict[str, np.ndarray]:
    return {name: values.copy() for name, values in read_safetensors(path).items()}


def test_a_file_of_zeros_is_not_made_of_a_quantised_model(tmp_path: Path) -> None:
    """What is written decodes to nearly what was there."""
    quantize_model(CHECKPOINTS / "llama-untied" / "bf16", tmp_path / "out")
    tensors = read_safetensors(tmp_path / "out" / "model.safetensors")
    original = read_safetensors(CHECKPOINTS / "llama-untied" / "bf16" / "model.safetensors")
    for layer in ("model.layers.0", "model.layers.1"):
        weight = original[f"{layer}.mlp.gate_proj.weight"].astype(np.float32)
        made = dequantize(nvfp4_of(tensors, f"{layer}.mlp.gate_proj"))
        assert np.linalg.norm(made - weight) < 0.1 * np.linalg.norm(weight)


def writable_source(path: Path, model: str = "llama-untied") -> Path:
    source = path / "source"
    shutil.copytree(CHECKPOINTS / model / "bf16", source)
    for entry in (source, *source.iterdir()):
        entry.chmod(0o755 if entry.is_dir() else 0o644)
    return source


@pytest.mark.parametrize("calibration", [None, TEXT])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, r"tensor model\.layers\.2\.\S+ is missing"),
        ({"hidden_size": 64}, r"tensor \S+: expected shape \[\d+, 64\] by config\.json"),
        ({"intermediate_size": 128}, r"tensor \S+: expected shape \[128, 128\] by config\.json"),
        ({"num_attention_heads": 8}, r"tensor \S+: expected shape \[\d+, 128\] by config\.json"),
        ({"vocab_size": 1000}, r"tensor \S+: expected shape \[1000, 128\] by config\.json"),
    ],
)
def test_a_source_that_contradicts_its_configuration_is_refused(
    tmp_path: Path, change: dict[str, int], message: str, calibration: str | None
) -> None:
    """Nothing is written that could not be loaded; with a calibration the same line, and no other."""
    source = writable_source(tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=message):
        quantize_model(source, tmp_path / "out", calibration=calibration)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("missing", ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"])
@pytest.mark.parametrize("calibration", [None, TEXT])
def test_a_source_without_a_tensor_is_refused(tmp_path: Path, missing: str, calibration: str | None) -> None:
    source = writable_source(tmp_path)
    tensors = load_file_bytes(source / "model.safetensors")
    del tensors[missing]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {missing} is missing"):
        quantize_model(source, tmp_path / "out", calibration=calibration)


@pytest.mark.parametrize("calibration", [None, TEXT])
@pytest.mark.parametrize(
    ("name", "value"),
    [("model.norm.weight", np.nan), ("model.embed_tokens.weight", np.nan), ("lm_head.weight", np.inf)],
)
def test_what_is_not_quantised_must_hold_numbers_too(
    tmp_path: Path, name: str, value: float, calibration: str | None
) -> None:
    source = writable_source(tmp_path)
    tensors = load_file_bytes(source / "model.safetensors")
    tensors[name].flat[5] = value
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {name} holds infinities or NaN"):
        quantize_model(source, tmp_path / "out", calibration=calibration)


def test_a_number_too_large_for_bf16_is_refused(tmp_path: Path) -> None:
    """The largest float32 rounds to infinity in BF16."""
    source = writable_source(tmp_path)
    tensors = {n: t.astype(np.float32) for n, t in load_file_bytes(source / "model.safetensors").items()}
    tensors["model.norm.weight"][0] = np.finfo(np.float32).max
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight holds infinities or NaN in BF16"):
        quantize_model(source, tmp_path / "out")


def test_a_gguf_without_a_layer_is_refused_by_its_own_name(tmp_path: Path) -> None:
    weights = random_weights(np.random.default_rng(0))
    path = tmp_path / "m.gguf"
    write_gguf(path, {name: values for name, values in weights.items() if ".layers.1." not in name})
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor model\.layers\.1\.\S+ is missing") as caught:
        quantize_model(path, tmp_path / "out")
    assert "partial" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_gguf_that_holds_no_numbers_is_refused_in_one_line(tmp_path: Path) -> None:
    """Scales of infinity and codes of 0: no warning of NumPy's comes with the line."""
    weights = random_weights(np.random.default_rng(0))
    path, name = tmp_path / "m.gguf", "model.layers.0.mlp.up_proj.weight"
    write_gguf(path, weights, kinds={name: GGMLQuantizationType.Q8_0})
    clean = path.read_bytes()
    block = quantize_ggml(weights[name], GGMLQuantizationType.Q8_0).tobytes()[:34]
    path.write_bytes(clean.replace(block, np.float16(np.inf).tobytes() + bytes(32)))
    assert path.read_bytes() != clean
    with pytest.raises(CheckpointError, match=r"m\.gguf/\S+: tensor model\S+ holds infinities or NaN"):
        quantize_model(path, tmp_path / "out")


@pytest.mark.parametrize("out", ["source", "source/../source", "link", "."])
def test_the_source_is_not_replaced(tmp_path: Path, out: str) -> None:
    source = writable_source(tmp_path)
    (tmp_path / "link").symlink_to("source")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"--out .*: --model is in it; expected another directory"):
        quantize_model(source, tmp_path / out, force=True)
    assert not (source / "hf_quant_config.json").exists()
