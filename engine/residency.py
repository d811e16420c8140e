"""What an engine keeps in device memory, taken in one order: for the engine, and for plans of it."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TextIO

from cuda.core import MemoryResource

from engine.backend.keeping import KeepingBackend
from engine.backend.protocol import Backend, DType
from engine.config import EngineConfig, EngineLimits
from engine.devices import Device
from engine.errors import ConfigurationError
from engine.injected import adopt
from engine.kv_cache import AttentionStateSpec, KVCache, bytes_per_block
from engine.kv_sizing import KVPlan, fit_length, least_blocks, plan_kv_cache
from engine.levers import Lever, MemoryDemand, find_levers
from engine.memory.adaptors import cap_of
from engine.memory.errors import AllocationRequest
from engine.memory.house import MemoryHouse
from engine.memory.settings import TraceSettings
from engine.model.checkpoint import Checkpoint
from engine.model.config import ModelConfig
from engine.model.llama import Llama, Workspace
from engine.model.loader import Progress, WeightLoader
from engine.model.registry import model_class

__all__ = ["Residency", "Resident"]


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """What steps run on."""

    backend: Backend
    model: Llama
    kv_plan: KVPlan
    kv_cache: KVCache


class Residency:
    """Weights, workspace and KV cache of one engine, in the memory of one device.

    `open_house`, then `fill`. What is known when one of them fails is in the attributes: those of later
    stages are None.

    Parameters
    ----------
    memory
        The device's memory; None: the device's own resource.
    trace
        What the memory house watches.
    output
        Takes trace lines; None: nobody does.
    progress
        Told of the load, tensor by tensor.

    Attributes
    ----------
    limits : EngineLimits
        As the flags say; once the KV cache was sized, with the length that it holds.
    demand : MemoryDemand or None
        What the engine needs, computed; there once the device's memory is.
    house : MemoryHouse or None
    total : int
        Bytes that the device has, or that the memory may take of it; 0 before the house is open.
    kv_plan : KVPlan or None

    Raises
    ------
    ConfigurationError
        A flag contradicts the model.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        checkpoint: Checkpoint,
        *,
        trace: TraceSettings,
        memory: MemoryResource | None = None,
        output: TextIO | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.checkpoint = checkpoint
        self._trace = trace
        self._memory = memory
        self._output = output
        self._progress = progress
        model_config = checkpoint.config
        self.limits = EngineLimits.resolve(
            config,
            device=device.name,
            vocab_size=model_config.vocab_size,
            max_position_embeddings=model_config.max_position_embeddings,
        )
        self.kv_dtype = _kv_dtype(config, checkpoint)
        self._specs = _state_specs(model_config, self.kv_dtype)
        self.block_bytes = bytes_per_block(self._specs, self.limits.block_size)
        """of the KV cache, in all layers"""
        self._fit(fit_length(config, self.limits, self.block_bytes))
        self.demand: MemoryDemand | None = None
        self.house: MemoryHouse | None = None
        self.kv_plan: KVPlan | None = None
        self.total = 0
        self._parts = ExitStack()

    def open_house(self) -> MemoryHouse:
        """Open the device's memory, and build the house over it.

        Raises
        ------
        ConfigurationError
            The device cannot use the memory.
        TraceFileError
            The trace cannot be written where it should.
        """
        memory, device = self._memory, self.device
        if memory is None:
            memory = device.open_memory(observe=self._trace.observe)
            if (close := getattr(memory, "close", None)) is not None:
                self._parts.callback(close)
        upstream, gauge = adopt(memory, device.capacity)
        if not device.can_use(upstream):
            raise ConfigurationError(
                f"--device {device.name}: it cannot use the memory of {type(upstream).__name__}"
            )
        cap = cap_of(upstream)
        self.total = gauge.total if cap is None else min(gauge.total, cap)
        # An explicit KV cache is checked by allocating it. Else everything must fit the share of the device.
        share = self.config.gpu_memory_utilization
        limit = None if self.config.kv_cache_memory is not None else int(share * self.total)
        house = MemoryHouse.build(upstream, self._trace, output=self._output, gauge=gauge, limit=limit)
        self._parts.callback(house.close)
        self.house = house
        return house

    def fill(self) -> Resident:
        """Load the weights, reserve for steps, and give the KV cache what is left, or what was asked for.

        Raises
        ------
        CheckpointError
            The checkpoint is not sound.
        AllocationError
            A request failed. What was taken stays until `close`, or is held by the error's traceback: the
            failure's ledger shows it.
        """
        assert self.house is not None, "open_house() comes before fill()"
        backend = self._open_backend(self.house)
        keeping: Any = KeepingBackend(backend)
        config = self.checkpoint.config
        loader = WeightLoader(self.checkpoint, config, keeping, progress=self._progress)
        model = model_class(config.architecture)(config, loader, backend)
        model.reserve(self.limits.step)
        backend.reserve(self.limits.step)
        plan = self._plan_kv_cache(self.house)
        cache = self._allocate_kv_cache(plan, backend, loader)
        return Resident(backend, model, plan, cache)

    def close(self) -> None:
        """Give back all memory but the model's, which goes with it. Idempotent."""
        self._parts.close()

    def estimate_levers(self, request: AllocationRequest) -> list[Lever]:
        """What would help against the failure of `request`, computed from what the engine needs."""
        return [] if self.demand is None else find_levers(request, self.demand)

    def _open_backend(self, house: MemoryHouse) -> Backend:
        backend = self.device.open_backend(house.resource)
        self._parts.callback(backend.close)
        self.demand = MemoryDemand(
            config=self.config,
            limits=self.limits,
            device=self.device.name,
            total=self.total,
            limit=None if house.limiting is None else house.limiting.limit,
            weights=self.checkpoint.nbytes,
            scratch=self.checkpoint.largest_tensor,
            workspace=_WorkspaceBytes(self.checkpoint.config, backend.activation_dtype),
            kv_block=self.block_bytes,
            kv_blocks=least_blocks(self.config, self.limits, self.block_bytes),
            kv_dtype=self.kv_dtype,
        )
        return backend

    def _plan_kv_cache(self, house: MemoryHouse) -> KVPlan:
        # Keys and values of each layer are a request of their own.
        available = house.available_in(2 * len(self._specs))
        plan = plan_kv_cache(self.config, self.limits, self.block_bytes, available=available)
        self._fit(plan.limits)
        self.kv_plan = plan
        if self.demand is not None:
            self.demand = replace(self.demand, limits=self.limits, kv_blocks=plan.num_blocks)
        return plan

    def _allocate_kv_cache(self, plan: KVPlan, backend: Backend, loader: WeightLoader) -> KVCache:
        specs = [_with_scales(spec, loader, layer) for layer, spec in enumerate(self._specs)]
        cache = KVCache(specs, plan.num_blocks, self.limits.block_size)
        self._parts.callback(cache.close)
        cache.allocate(backend)
        return cache

    def _fit(self, limits: EngineLimits) -> None:
        if limits.max_model_len < self.limits.max_model_len:
            self.checkpoint.log.warning(
                "max_model_len is %s, not the model's %s: that is what --kv-cache-memory holds",
                f"{limits.max_model_len:,}",
                f"{self.limits.max_model_len:,}",
            )
        self.limits = limits


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
