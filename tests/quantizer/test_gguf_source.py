"""GGUF files written by the gguf library, read back by their Hugging Face names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from engine.errors import CheckpointError, UnsupportedModelError
from engine.quantizer.gguf_source import GGUFModel, convert_gguf
from engine.quantizer.source import Source
from tests.quantizer.gguf_files import HEADS, HIDDEN, interleave, random_weights, write_gguf


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    return random_weights(np.random.default_rng(0))


def test_interleaving_is_not_the_identity(weights: dict[str, np.ndarray]) -> None:
    query = weights["model.layers.0.self_attn.q_proj.weight"]
    assert not np.array_equal(interleave(query, HEADS), query)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("arch", "bias"), [("llama", False), ("llama", True), ("qwen2", True), ("qwen3", False)]
)
def test_tensors_come_back_by_their_names(tmp_path: Path, arch: str, bias: bool, tied: bool) -> None:
    weights = random_weights(np.random.default_rng(1), bias=bias, tied=tied)
    write_gguf(tmp_path / "m.gguf", weights, arch=arch)
    model = GGUFModel(tmp_path / "m.gguf")
    assert set(model.names) == set(weights)
    for name, values in weights.items():
        np.testing.assert_array_equal(model.tensor(name), values, err_msg=name)
    config = model.config()
    assert config["tie_word_embeddings"] is tied
    assert config["attention_bias"] is bias
    assert config["model_type"] == arch


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "BF16", "Q4_0"])
def test_quantised_tensors_are_dequantised(tmp_path: Path, weights: dict[str, np.ndarray], kind: str) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    ggml = gguf.GGMLQuantizationType[kind]
    write_gguf(tmp_path / "m.gguf", weights, kinds={name: ggml})
    expected = dequantize(quantize(weights[name], ggml), ggml)
    np.testing.assert_array_equal(GGUFModel(tmp_path / "m.gguf").tensor(name), expected)


def test_converts_to_a_directory(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    write_gguf(tmp_path / "m.gguf", weights)
    out = tmp_path / "out"
    out.mkdir()
    calls: list[tuple[int, int]] = []
    convert_gguf(tmp_path / "m.gguf", out, lambda done, total: calls.append((done, total)))
    source = Source(out)
    assert set(source.tensors) == set(weights)
    for name, values in weights.items():
        np.testing.assert_array_equal(source.tensor(name), values.astype(ml_dtypes.bfloat16))
    assert calls[-1][0] == calls[-1][1] > 0
    assert calls == sorted(calls)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5, "the shortest decimal, not 9.999999747378752e-06"
    assert (config["head_dim"], config["num_key_value_heads"]) == (16, 2)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2


def test_llama3_rotary_factors_become_their_four_numbers(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    dim, base = HIDDEN // HEADS, 10000.0
    frequencies = 1 / base ** (np.arange(0, dim, 2) / dim)
    factors = []  # as llama.cpp's conversion script computes them
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            factors.append(1)
        elif wavelength > 8192:
            factors.append(32)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 32 + smooth))
    assert min(factors) == 1
    assert max(factors) == 32
    write_gguf(tmp_path / "m.gguf", weights, extra={"rope_freqs.weight": np.array(factors, np.float32)})
    assert GGUFModel(tmp_path / "m.gguf").config()["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_rotary_factors_are_refused(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    factors = np.linspace(1, 32, HIDDEN // HEADS // 2, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", weights, extra={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        GGUFModel(tmp_path / "m.gguf").config()


def test_sliding_window_makes_it_mistral(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    write_gguf(tmp_path / "m.gguf", weights, fields={"llama.attention.sliding_window": 128})
    config = GGUFModel(tmp_path / "m.gguf").config()
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 128)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"arch": "gemma"}, UnsupportedModelError, "architecture 'gemma' is not served"),
        (
            {"extra": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}},
            UnsupportedModelError,
            "blk.0.attn_sinks",
        ),
        ({"fields": {"llama.expert_count": 8}}, UnsupportedModelError, "mixture-of-experts"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, UnsupportedModelError, "rotary scaling 'yarn'"),
        ({"leave_out": frozenset({"head_count"})}, CheckpointError, "llama.attention.head_count is missing"),
        (
            {"leave_out": frozenset({"feed_forward_length"})},
            CheckpointError,
            "llama.feed_forward_length is missing",
        ),
    ],
)
def test_what_is_not_served_is_said_in_one_line(
    tmp_path: Path, weights: dict[str, np.ndarray], options: dict, error: type[Exception], message: str
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, weights, **options)
    with pytest.raises(error, match=message) as caught:
        GGUFModel(path).config()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_embeddings_are_refused(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    del weights["model.embed_tokens.weight"]
    write_gguf(tmp_path / "m.gguf", weights)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight is missing"):
        GGUFModel(tmp_path / "m.gguf")


def test_damaged_files_are_refused_in_one_line(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match="no such file"):
        GGUFModel(path)
    write_gguf(path, weights)
    whole = path.read_bytes()
    rng = np.random.default_rng(5)
    refused = 0
    for size in [0, 1, 8, 23, 24, 100, *rng.integers(200, len(whole) - 1, 10)]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="not a readable GGUF file, or only part of one") as caught:
            GGUFModel(path)
        assert "\n" not in str(caught.value)
        refused += 1
    assert refused == 16
    path.write_bytes(os.urandom(4096))
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        GGUFModel(path)


def test_heads_that_do_not_divide_the_rows_are_refused(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, weights, leave_out=frozenset({"head_count"}), fields={"llama.attention.head_count": 7})
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_q\.weight: 64 rows are not 7 heads"):
        GGUFModel(path).tensor(name)
