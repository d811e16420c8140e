"""Sizes and tensors of the KV cache. How blocks are given to sequences is tested with the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from engine.backend.protocol import DType
from engine.config import EngineConfig, EngineLimits
from engine.errors import ConfigurationError
from engine.kv_cache import AttentionStateSpec, KVCache, bytes_per_block
from engine.kv_sizing import KVPlan, fit_length, plan_kv_cache
from engine.memory.adaptors import Fault, FaultInjectingMemoryResource, StatisticsMemoryResource
from engine.memory.errors import OutOfMemoryError
from engine.memory.resources import HostMemoryResource
from tests.engine.fakes import FakeBackend, limits_of

SPECS = [AttentionStateSpec(f"model.layers.{i}", 3, 64, DType.FLOAT8_E4M3, 0.5, 0.25) for i in range(4)]
BLOCK = 4 * 2 * 16 * 3 * 64


def test_bytes_per_block_is_what_is_allocated() -> None:
    memory = StatisticsMemoryResource(HostMemoryResource(1 << 24))
    backend: Any = FakeBackend(memory)
    assert bytes_per_block(SPECS, 16) == BLOCK
    cache = KVCache(SPECS, 5, 16)
    cache.allocate(backend)
    assert cache.nbytes == memory.live == 5 * BLOCK
    assert set(memory.live_by_tag()) == {f"kv/model.layers.{i}.{side}" for i in range(4) for side in "kv"}
    layer = cache.layers[2]
    assert layer.key.shape == layer.value.shape == (5, 16, 3, 64)
    assert layer.key.dtype is DType.FLOAT8_E4M3
    assert (layer.key_scale, layer.value_scale) == (0.5, 0.25)
    cache.close()
    cache.close()
    assert memory.live == 0


def test_wider_elements_take_more_bytes() -> None:
    for dtype, width in ((DType.BFLOAT16, 2), (DType.FLOAT32, 4)):
        spec = AttentionStateSpec("model.layers.0", 3, 64, dtype)
        assert bytes_per_block([spec] * 4, 16) == width * BLOCK


def test_a_cache_that_does_not_fit_keeps_what_it_got_for_the_ledger_and_gives_it_back() -> None:
    host = HostMemoryResource(1 << 24)
    memory = FaultInjectingMemoryResource(host, [Fault(tag="kv/model.layers.3.v")])
    backend: Any = FakeBackend(memory)
    cache = KVCache(SPECS, 5, 16)
    with pytest.raises(OutOfMemoryError) as caught:
        cache.allocate(backend)
    assert caught.value.tag == "kv/model.layers.3.v"
    assert host.live == 5 * BLOCK * 7 // 8
    cache.close()
    assert host.live == 0


# -- sizing ------------------------------------------------------------------------------------------------


def plan(available: int, limits: EngineLimits, **flags: object) -> KVPlan:
    config = EngineConfig.from_flags(model="m", **flags)
    return plan_kv_cache(config, fit_length(config, limits, 1000), 1000, available=available)


LIMITS = limits_of(max_model_len=64, block_size=4, max_num_seqs=4)  # 16 blocks a sequence


def test_given_memory_is_used_to_the_last_block() -> None:
    assert plan(0, LIMITS, kv_cache_memory=123_999).num_blocks == 123


def test_without_it_the_cache_takes_what_is_left_but_no_more_than_the_sequences_can_use() -> None:
    assert plan(20_500, LIMITS).num_blocks == 20
    assert plan(10**9, LIMITS).num_blocks == 4 * 16


def test_memory_that_was_asked_for_shortens_the_models_length() -> None:
    given = plan(0, LIMITS, kv_cache_memory=3_000)
    assert (given.num_blocks, given.limits.max_model_len) == (3, 12)


def test_what_is_left_never_shortens_it() -> None:
    """The allocation is made all the same, and fails with its tag and its reason."""
    for available in (5_999, -5):
        derived = plan(available, LIMITS)
        assert (derived.num_blocks, derived.limits.max_model_len) == (16, 64)


def test_a_length_that_was_asked_for_is_kept_or_refused() -> None:
    assert plan(-5, LIMITS, max_model_len=64).num_blocks == 16
    with pytest.raises(ConfigurationError) as caught:
        plan(0, LIMITS, max_model_len=64, kv_cache_memory=15_999)
    assert str(caught.value) == (
        "--max-model-len 64 takes 15.6 KiB of KV cache, and --kv-cache-memory 15999 holds 60 tokens; "
        "expected --max-model-len 60 or less, or --kv-cache-memory 15.7KiB or more"
    )
    assert plan(0, LIMITS, max_model_len=64, kv_cache_memory=16_077).num_blocks == 16, "15.7KiB does"


def test_memory_for_not_even_a_block() -> None:
    with pytest.raises(ConfigurationError, match="expected at least --kv-cache-memory 1000"):
        plan(0, LIMITS, kv_cache_memory=999)


def test_the_line_for_the_log() -> None:
    text = KVPlan(5434, limits_of(max_model_len=32768, block_size=16)).describe(1_000_000_000, "float8_e4m3")
    assert text == (
        "KV cache: 86,944 tokens in 5,434 blocks of 16, 953.7 MiB of float8_e4m3; "
        "room for 2.65 sequences of 32,768 tokens"
    )
