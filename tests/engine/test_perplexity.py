"""Perplexity beside transformers' logits, and texts that have none."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.errors import ConfigurationError, RequestError
from engine.llm import LLM
from engine.model.tokenizer import Tokenizer
from engine.perplexity import Perplexity, measure_perplexity, perplexity_config, windows
from tests.quantizer.test_nvfp4 import read_safetensors


def measure(model: Path, text: str, window: int | None = None) -> Perplexity:
    flags: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_cache_dtype": "float32"}
    with LLM(perplexity_config(str(model), text, window=window, **flags)) as llm:
        return measure_perplexity(llm, text, window)


@pytest.fixture
def model(shared_checkpoints: Path) -> Path:
    return shared_checkpoints / "llama-tied" / "NVFP4-modelopt"


def test_is_that_of_transformers(shared_checkpoints: Path, model: Path) -> None:
    directory = shared_checkpoints / "llama-tied"
    prompts = json.loads((directory / "ref-NVFP4-modelopt.json").read_text())["prompts"]
    [ids] = [prompt["token_ids"] for prompt in prompts if prompt["name"] == "bos_text"]
    tokenizer = Tokenizer.open(model)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.encode(text) == ids
    logits = np.load(directory / "ref-NVFP4-modelopt.logits.npz")["bos_text_all"][:-1].astype(np.float64)
    chosen = logits[np.arange(len(ids) - 1), ids[1:]]
    nll = float(np.mean(np.log(np.exp(logits).sum(axis=1)) - chosen))
    measured = measure(model, text)
    assert (measured.tokens, measured.predicted_tokens, measured.window) == (36, 35, 36)
    assert measured.nll_mean == pytest.approx(nll, rel=1e-3)
    assert measured.perplexity == pytest.approx(math.exp(nll), rel=1e-2)


def test_windows_know_nothing_of_each_other(model: Path) -> None:
    text = "It was the best of times!"  # ends and begins where tokens do
    one = measure(model, text)
    many = measure(model, text * 3, window=one.tokens)
    assert many.predicted_tokens == 3 * one.predicted_tokens
    assert many.nll_mean == pytest.approx(one.nll_mean, rel=1e-5)


def test_a_last_window_of_one_token_is_dropped() -> None:
    assert windows([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4]]
    assert windows([1, 2, 3], 3) == [[1, 2, 3]]
    assert windows([], 3) == []


@pytest.mark.parametrize("text", ["", "a"])
def test_a_text_that_predicts_nothing_is_refused(model: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match="--file: the text has fewer than two tokens"):
        perplexity_config(str(model), text)
    flags: dict[str, Any] = {"device": "cpu", "threads": 1}
    config = perplexity_config(str(model), "a b c", **flags)
    with LLM(config) as llm, pytest.raises(RequestError, match="fewer than two tokens"):
        measure_perplexity(llm, text)


def test_a_window_as_long_as_the_model_is_refused(model: Path) -> None:
    with pytest.raises(ConfigurationError, match="--window 2048: the model has 2048 positions"):
        perplexity_config(str(model), "a b c", window=2048)


def test_a_model_that_is_sure_and_wrong_has_an_infinite_one(model: Path, tmp_path: Path) -> None:
    """exp of a mean above 709 nats is no float64."""
    sure = tmp_path / "sure"
    shutil.copytree(model, sure, copy_function=shutil.copyfile)
    sure.chmod(0o755)
    tensors = {name: values.copy() for name, values in read_safetensors(sure / "model.safetensors").items()}
    tensors["model.norm.weight"][:] = 10_000
    save_file(tensors, sure / "model.safetensors")
    measured = measure(sure, "a b c d")
    assert measured.nll_mean > 709
    assert measured.perplexity == math.inf
