"""The composition root: the one place where an engine's parts are made and handed to each other."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TextIO, TypeVar

from cuda.core import MemoryResource

from engine.backend.protocol import Backend, DType
from engine.block_pool import BlockPool
from engine.config import EngineConfig, EngineLimits
from engine.core import EngineCore
from engine.devices import choose_device
from engine.errors import CheckpointError, ConfigurationError
from engine.failure import FailureRecord, FailureReporter, failure_directory
from engine.injected import adopt
from engine.kv_cache import AttentionStateSpec, KVCache, KVCacheManager, bytes_per_block
from engine.kv_sizing import KVPlan, fit_length, least_blocks, plan_kv_cache
from engine.levers import MemoryDemand
from engine.memory.adaptors import cap_of
from engine.memory.errors import TraceFileError
from engine.memory.house import MemoryHouse
from engine.memory.scope import allocation_helper
from engine.memory.settings import TraceSettings
from engine.model.checkpoint import Checkpoint, resolve_model
from engine.model.config import ModelConfig
from engine.model.llama import Workspace
from engine.model.loader import WeightLoader
from engine.model.registry import model_class
from engine.model.tokenizer import Tokenizer
from engine.runner import ModelRunner
from engine.scheduler import Scheduler

__all__ = ["Engine", "Progress", "build_engine"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Told a label, the bytes done and all bytes"""

_USERS_ERRORS = (ConfigurationError, CheckpointError, TraceFileError)
"""What is wrong with a flag or a file is said in its one line; it takes no failure record."""


@dataclass(slots=True, eq=False)
class Engine:
    """An engine that is ready, and what stands around its core."""

    config: EngineConfig
    limits: EngineLimits
    model_config: ModelConfig
    tokenizer: Tokenizer
    house: MemoryHouse
    core: EngineCore
    kv_plan: KVPlan
    kv_bytes: int
    kv_dtype: DType
    _parts: ExitStack

    def close(self) -> None:
        """Give back all memory. Idempotent."""
        self._parts.close()


def build_engine(
    config: EngineConfig,
    *,
    trace: TraceSettings,
    output: TextIO,
    environ: Mapping[str, str],
    memory: MemoryResource | None = None,
    progress: Progress | None = None,
    on_failure: Callable[[FailureRecord], None] | None = None,
) -> Engine:
    """Load the model of `config` and make everything around it.

    Parameters
    ----------
    trace
        What the memory house watches.
    output
        Takes trace lines and ``engine-fatal``.
    environ
        Tells where failure records and compiled kernels go.
    memory
        The device's memory; None: the device's own resource.
    progress
        Told of the load, tensor by tensor.
    on_failure
        Told of each failure record.

    Raises
    ------
    ConfigurationError, CheckpointError, TraceFileError
        A flag, variable or file cannot be used.
    EngineDeadError
        Anything else went wrong: ``__cause__`` says what, and a failure record tells more. All memory was
        given back.
    """
    failures = FailureReporter(failure_directory(config, environ), config, output=output)
    if on_failure is not None:
        failures.on_record = on_failure
    parts = ExitStack()
    try:
        return _build(config, parts, failures, trace, output, environ, memory, progress)
    except Exception as error:
        is_users = isinstance(error, _USERS_ERRORS)
        record = None if is_users else failures.report(error, doing=f"loading {config.model}", fatal=True)
        _close_after(error, parts)
        if record is None:
            raise
        raise failures.dead(record) from error
    except BaseException as error:
        _close_after(error, parts)
        raise


def _build(
    config: EngineConfig,
    parts: ExitStack,
    failures: FailureReporter,
    trace: TraceSettings,
    output: TextIO,
    environ: Mapping[str, str],
    memory: MemoryResource | None,
    progress: Progress | None,
) -> Engine:
    device = choose_device(config, environ)
    checkpoint = Checkpoint.open(resolve_model(config.model))
    model_config = checkpoint.config
    tokenizer = Tokenizer.open(checkpoint.path)
    failures.decode = tokenizer.decode
    limits = EngineLimits.resolve(
        config,
        device=device.name,
        vocab_size=model_config.vocab_size,
        max_position_embeddings=model_config.max_position_embeddings,
    )
    kv_dtype = _kv_dtype(config, checkpoint)
    unscaled = _state_specs(model_config, kv_dtype)
    block_bytes = bytes_per_block(unscaled, limits.block_size)
    limits = fit_length(config, limits, block_bytes)

    if memory is None:
        memory = device.open_memory(observe=trace.observe)
        if (close := getattr(memory, "close", None)) is not None:
            parts.callback(close)
    upstream, gauge = adopt(memory, device.capacity)
    if not device.can_use(upstream):
        raise ConfigurationError(
            f"--device {device.name}: it cannot use the memory of {type(upstream).__name__}"
        )
    cap = cap_of(upstream)
    total = gauge.total if cap is None else min(gauge.total, cap)
    # An explicit KV cache is checked by allocating it. Else everything must fit the share of the device.
    limit = None if config.kv_cache_memory is not None else int(config.gpu_memory_utilization * total)
    house = MemoryHouse.build(upstream, trace, output=output, gauge=gauge, limit=limit)
    parts.callback(house.close)
    failures.house = house

    backend = device.open_backend(house.resource)
    parts.callback(backend.close)
    demand = MemoryDemand(
        config=config,
        limits=limits,
        device=device.name,
        total=total,
        limit=limit,
        weights=checkpoint.nbytes,
        scratch=checkpoint.largest_tensor,
        workspace=_WorkspaceBytes(model_config, backend.activation_dtype),
        kv_block=block_bytes,
        kv_blocks=least_blocks(config, limits, block_bytes),
        kv_dtype=kv_dtype,
    )
    failures.demand = lambda: demand

    keeping: Any = _KeepingBackend(backend)
    loader = WeightLoader(checkpoint, model_config, keeping, progress=progress)
    model = model_class(model_config.architecture)(model_config, loader, backend)
    model.reserve(limits.step)
    backend.reserve(limits.step)

    plan = plan_kv_cache(config, limits, block_bytes, available=house.available)
    limits = plan.limits
    failures.demand = lambda: replace(demand, limits=limits, kv_blocks=plan.num_blocks)
    specs = [_with_scales(spec, loader, layer) for layer, spec in enumerate(unscaled)]
    cache = KVCache(specs, plan.num_blocks, limits.block_size)
    parts.callback(cache.close)
    cache.allocate(backend)
    _log.info("%s", plan.describe(cache.nbytes, kv_dtype.label))

    manager = KVCacheManager(
        BlockPool(plan.num_blocks), limits.block_size, prefix_caching=config.enable_prefix_caching
    )
    core = EngineCore(
        limits,
        Scheduler(limits, manager, config.scheduling_policy),
        ModelRunner(model, backend, cache.layers, limits),
        eos_token_ids=model_config.eos_token_ids,
        failures=failures,
        seed=config.seed,
    )
    parts.callback(core.close)
    return Engine(
        config=config,
        limits=limits,
        model_config=model_config,
        tokenizer=tokenizer,
        house=house,
        core=core,
        kv_plan=plan,
        kv_bytes=cache.nbytes,
        kv_dtype=kv_dtype,
        _parts=parts,
    )


_KV_DTYPES = {
    "fp8": DType.FLOAT8_E4M3,
    "fp8_e4m3": DType.FLOAT8_E4M3,
    "bfloat16": DType.BFLOAT16,
    "float32": DType.FLOAT32,
}


def _kv_dtype(config: EngineConfig, checkpoint: Checkpoint) -> DType:
    """The flag's, else what the checkpoint was calibrated for."""
    if config.kv_cache_dtype != "auto":
        return _KV_DTYPES[config.kv_cache_dtype]
    return DType.FLOAT8_E4M3 if checkpoint.has_fp8_kv_cache else DType.BFLOAT16


def _state_specs(config: ModelConfig, dtype: DType) -> list[AttentionStateSpec]:
    return [
        AttentionStateSpec(f"model.layers.{layer}", config.num_kv_heads, config.head_dim, dtype)
        for layer in range(config.num_layers)
    ]


def _with_scales(spec: AttentionStateSpec, loader: WeightLoader, layer: int) -> AttentionStateSpec:
    if spec.dtype is not DType.FLOAT8_E4M3:
        return spec
    key_scale, value_scale = loader.kv_scales(layer)
    return replace(spec, key_scale=key_scale, value_scale=value_scale)


class _KeepingBackend:
    """A backend that remembers what was loaded, for as long as the load takes.

    cuda.core's buffers must not be destroyed by an exception on its way up: its callback then runs into the
    pending exception, loses it, and does not free the buffer. So a half-built model must not hold the only
    reference. What is kept is let go when the exception has been caught.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._kept: list[object] = []

    @allocation_helper
    def empty(self, *arguments: Any) -> object:
        return self._keep(self._backend.empty(*arguments))

    @allocation_helper
    def from_host(self, *arguments: Any) -> object:
        return self._keep(self._backend.from_host(*arguments))

    @allocation_helper
    def load_linear(self, *arguments: Any) -> object:
        return self._keep(self._backend.load_linear(*arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _keep(self, loaded: T) -> T:
        self._kept.append(loaded)
        return loaded


class _WorkspaceBytes:
    """Bytes of a model's workspace, found by making it on a backend that only counts."""

    def __init__(self, config: ModelConfig, activation_dtype: DType) -> None:
        self._config = config
        self.activation_dtype = activation_dtype
        self._count = 0

    def __call__(self, limits: EngineLimits) -> int:
        self._count = 0
        counter: Any = self
        Workspace(self._config, counter, limits.step)
        return self._count

    def empty(self, shape: tuple[int, ...], dtype: DType) -> None:
        self._count += math.prod(shape) * dtype.itemsize


def _close_after(error: BaseException, parts: ExitStack) -> None:
    """Give back all memory: what `parts` hold, and what the frames that `error` went through still name."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    parts.close()
