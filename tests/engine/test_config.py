from __future__ import annotations

import math

import msgspec
import pytest

from engine.config import EngineConfig, EngineLimits
from engine.errors import ConfigurationError


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("model", "", "--model: expected a directory"),
        ("model", "m\udcff", r"--model 'm\udcff': expected a path in UTF-8"),
        ("failure_dir", "f\udcff", r"--failure-dir 'f\udcff': expected a path in UTF-8"),
        ("device", "tpu", "--device 'tpu': expected one of auto, cpu, cuda"),
        ("kv_cache_dtype", "int4", "--kv-cache-dtype 'int4': expected one of auto, fp8"),
        ("kv_cache_memory", 0, "--kv-cache-memory 0: expected a whole number from 1"),
        ("kv_cache_memory", 1.5, "--kv-cache-memory 1.5: expected a whole number"),
        ("device_memory", -1, "--device-memory -1: expected"),
        ("gpu_memory_utilization", 0.0, "--gpu-memory-utilization 0.0: expected a number over 0"),
        ("gpu_memory_utilization", 1.1, "--gpu-memory-utilization 1.1: expected"),
        ("gpu_memory_utilization", math.nan, "--gpu-memory-utilization nan: expected"),
        ("max_num_seqs", 0, "--max-num-seqs 0: expected a whole number from 1"),
        ("max_model_len", True, "--max-model-len True: expected"),
        ("max_num_batched_tokens", 0, "--max-num-batched-tokens 0: expected"),
        ("block_size", 257, "--block-size 257: expected a whole number from 1 to 256"),
        ("threads", 0, "--threads 0: expected"),
        ("seed", -1, "--seed -1: expected"),
        ("scheduling_policy", "lifo", "--scheduling-policy 'lifo': expected one of fcfs, priority"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_flag(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineConfig(**{"model": "m", field: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_a_step_must_hold_a_token_of_every_sequence() -> None:
    with pytest.raises(
        ConfigurationError, match="--max-num-batched-tokens 4: expected at least --max-num-seqs 8"
    ):
        EngineConfig(model="m", max_num_batched_tokens=4, max_num_seqs=8)
    with pytest.raises(ConfigurationError, match="--max-logits-rows 4: expected at least --max-num-seqs 8"):
        EngineConfig(model="m", max_logits_rows=4, max_num_seqs=8)


def test_flags_that_were_not_given_keep_their_defaults() -> None:
    config = EngineConfig.from_flags(model="m", block_size=None, max_num_seqs=None, device="cpu")
    assert config == EngineConfig(model="m", device="cpu")
    with pytest.raises(ConfigurationError, match="--speed: the engine has no such flag"):
        EngineConfig.from_flags(model="m", speed=11)
    with pytest.raises(ConfigurationError, match="--model: expected"):
        EngineConfig.from_flags(device="cpu")


def test_a_configuration_crosses_to_another_process() -> None:
    config = EngineConfig(model="m", kv_cache_memory=10**9, seed=2**64 - 1)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


def resolve(positions: int = 2048, **flags: object) -> EngineLimits:
    config = EngineConfig.from_flags(model="m", **flags)
    return EngineLimits.resolve(config, device="cpu", vocab_size=100, max_position_embeddings=positions)


def test_limits_follow_from_device_and_model() -> None:
    limits = resolve()
    assert (limits.max_model_len, limits.max_num_batched_tokens, limits.block_size) == (2048, 512, 16)
    assert limits.max_logits_rows == limits.max_num_seqs == 32
    assert limits.max_blocks_per_seq == 128
    step = limits.step
    assert (step.max_tokens, step.max_seqs, step.max_blocks_per_seq) == (512, 32, 128)
    assert (step.max_logits_rows, step.vocab_size, step.block_size) == (32, 100, 16)


def test_one_flag_moves_what_depends_on_it() -> None:
    assert resolve(max_num_batched_tokens=5).max_num_seqs == 5, (
        "fewer sequences than by default fit a small step"
    )
    assert resolve(max_num_seqs=600).max_num_batched_tokens == 600
    assert resolve(max_logits_rows=100_000).max_logits_rows == 512, "a step has no more rows than tokens"
    assert resolve(max_model_len=17, block_size=16).max_blocks_per_seq == 2


def test_a_length_beyond_the_models_positions() -> None:
    with pytest.raises(ConfigurationError, match="--max-model-len 4096: the model has 2048 positions"):
        resolve(max_model_len=4096)
