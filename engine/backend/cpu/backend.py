"""The `Backend` protocol in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numba
import numpy as np

from engine.backend.cpu import elementwise, norm, rope
from engine.backend.cpu.attention import Attention
from engine.backend.cpu.inputs import HostStepInputs, InputWriter
from engine.backend.cpu.layout import reserve_step
from engine.backend.cpu.linear import CpuLinear, load_linear, scratch_size
from engine.backend.cpu.tensor import HostTensor, array_of
from engine.backend.cpu.threads import limit_spinning, resolve_threads
from engine.backend.protocol import (
    AttentionSpec,
    DType,
    KVLayer,
    Linear,
    LinearSource,
    StepBatch,
    StepInputs,
    StepLimits,
    Tensor,
)
from engine.errors import EngineError
from engine.memory.scope import allocation_helper

if TYPE_CHECKING:
    from cuda.core import MemoryResource

    from engine.sampler import SampledTokens, SamplingRow

__all__ = ["CpuBackend"]

_SERIAL_ELEMENTS = 1 << 20
"""Elements below which one thread does an element-wise operation: half a millisecond at most. Two would take
half of that, and ten times as long when the other core is busy with something else."""
_NO_NORM = np.empty(0, np.float32)


class CpuBackend:
    """Runs a model on the host's cores, in float32.

    Parameters
    ----------
    memory
        Gives every byte: weights, caches, activations, scratch. It must be accessible from the host.
    threads
        Cores to use; None: all that the process may use.

    Raises
    ------
    ConfigurationError
        More threads than cores were asked for.
    """

    name = "cpu"
    activation_dtype = DType.FLOAT32
    runs_ahead = False

    def __init__(self, memory: MemoryResource, *, threads: int | None = None) -> None:
        limit_spinning()
        self.threads = resolve_threads(threads)
        self._memory = memory
        self._loaded: list[CpuLinear] = []
        self._reserved: list[HostTensor] = []
        self._inputs: InputWriter | None = None
        self._attention: Attention | None = None
        self._scratch = np.empty((0, 0), np.float32)

    # -- memory --------------------------------------------------------------------------------------------

    @allocation_helper
    def empty(self, shape: tuple[int, ...], dtype: DType) -> HostTensor:
        """Uninitialised tensor, tagged by the current memory scope."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return HostTensor.of(self._memory.allocate(size, stream=None), shape, dtype)

    @allocation_helper
    def from_host(self, array: np.ndarray, dtype: DType) -> HostTensor:
        """Copy of `array`, which holds `dtype`'s values in its NumPy carrier."""
        assert array.dtype == dtype.carrier, (
            f"{dtype.label} travels as {dtype.carrier.__name__}, not {array.dtype}"
        )
        tensor = self.empty(array.shape, dtype)
        tensor.array[...] = array
        return tensor

    def to_host(self, tensor: Tensor) -> np.ndarray:
        """Copy in `dtype`'s NumPy carrier."""
        return array_of(tensor).copy()

    @allocation_helper
    def load_linear(self, parts: Sequence[LinearSource]) -> Linear:
        """One resident linear out of parts stacked along N. Each part keeps its own global scale."""
        linear = load_linear(parts, self.empty)
        self._loaded.append(linear)
        return linear

    def as_table(self, linear: Linear) -> Tensor:
        """The BF16 linear's own bytes as an embedding table [N, K].

        Raises
        ------
        ValueError
            The linear is of another format.
        """
        assert isinstance(linear, CpuLinear)
        return linear.table()

    def reserve(self, limits: StepLimits) -> None:
        """Allocate io buffers and kernel scratch for steps up to `limits`."""
        linear_scratch = scratch_size(self._loaded)
        self._loaded.clear()  # the model's from here on
        memory = reserve_step(limits, self.threads, linear_scratch, self._reserve)
        self._inputs = InputWriter(limits, memory.inputs)
        self._scratch = memory.scratch.array
        self._attention = Attention(self._scratch, memory.partials.array)

    @allocation_helper
    def _reserve(self, shape: tuple[int, ...], dtype: DType) -> HostTensor:
        tensor = self.empty(shape, dtype)
        self._reserved.append(tensor)
        return tensor

    def close(self) -> None:
        """Give back what the backend itself holds. Idempotent."""
        self._inputs = self._attention = None
        self._scratch = np.empty((0, 0), np.float32)
        self._loaded.clear()
        while self._reserved:
            self._reserved.pop().buffer.close()

    # -- one step ------------------------------------------------------------------------------------------

    def prepare(self, batch: StepBatch) -> StepInputs:
        """Copy the step's inputs to io memory, and check them.

        Raises
        ------
        EngineError
            A token id is not in the vocabulary, or the step is larger than the limits, or contradicts itself.
        """
        assert self._inputs is not None, "reserve() comes before prepare()"
        numba.set_num_threads(self.threads)  # of the calling thread
        return self._inputs.write(batch)

    def run(self, forward: Callable[[StepInputs], Tensor], inputs: StepInputs) -> Tensor:
        """``forward(inputs)``"""
        return forward(inputs)

    def embedding(self, token_ids: Tensor, table: Tensor, *, out: Tensor) -> None:
        """``out[t] = table[token_ids[t]]``; table BFLOAT16 [V, H], out [T, H]."""
        elementwise.embedding(array_of(token_ids), array_of(table), array_of(out))

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        """``out[r] = x[rows[r]]``"""
        elementwise.gather_rows(array_of(x), array_of(rows), array_of(out))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
        """``out = x / sqrt(mean(x²) + eps) * weight``. `out` may be `x`."""
        norm.rms_norm(array_of(x), array_of(weight), eps, array_of(out))

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, *, out: Tensor
    ) -> None:
        """``residual += delta`` in place, then ``out = rms_norm(residual)``. `out` may be `delta`."""
        arrays = array_of(residual), array_of(delta), array_of(weight), eps, array_of(out)
        if arrays[0].size < _SERIAL_ELEMENTS:
            norm.add_rms_norm(*arrays)
        else:
            norm.add_rms_norm_parallel(*arrays, self.threads)

    def silu_and_mul(self, gate_up: Tensor, *, out: Tensor) -> None:
        """``out = silu(gate_up[:, :I]) * gate_up[:, I:]``; gate_up [T, 2I]."""
        source, target = array_of(gate_up), array_of(out)
        if target.size < _SERIAL_ELEMENTS:
            elementwise.silu_and_mul(source, target)
        else:
            elementwise.silu_and_mul_parallel(source, target, self.threads)

    def linear(self, x: Tensor, weight: Linear, *, out: Tensor) -> None:
        """``out = x @ W.T + bias``; x [T, K], out [T, N]."""
        assert isinstance(weight, CpuLinear)
        weight.apply(array_of(x), array_of(out), self._scratch)

    def rope_and_store_kv(self, qkv: Tensor, inputs: StepInputs, kv: KVLayer, spec: AttentionSpec) -> None:
        """Norm q and k per head where the spec asks, rotate them (rotate-half), store k and v.

        Raises
        ------
        EngineError
            The cache does not fit the spec, or the step names blocks that it does not have.
        """
        checked = _checked(inputs, kv, spec)
        array, scratch = array_of(qkv), self._scratch
        arguments = (
            array,
            array_of(checked.positions),
            array_of(checked.slot_mapping),
            array_of(kv.key),
            array_of(kv.value),
            kv.key_scale,
            kv.value_scale,
            spec.num_heads,
            array_of(spec.inv_freq),
            spec.rope_magnitude,
            _NO_NORM if spec.q_norm is None else array_of(spec.q_norm),
            _NO_NORM if spec.k_norm is None else array_of(spec.k_norm),
            spec.norm_eps,
        )
        if array.size < _SERIAL_ELEMENTS:
            rope.rope_and_store_kv(*arguments, scratch[0])
        else:
            rope.rope_and_store_kv_parallel(*arguments, scratch)

    def attention(
        self, qkv: Tensor, inputs: StepInputs, kv: KVLayer, spec: AttentionSpec, *, out: Tensor
    ) -> None:
        """Causal attention of the q part of `qkv` over the paged cache. out [T, heads * head_dim].

        Raises
        ------
        EngineError
            As for `rope_and_store_kv`; or the heads are too large for the scratch.
        """
        assert self._attention is not None, "reserve() comes before attention()"
        self._attention(array_of(qkv), _checked(inputs, kv, spec), kv, spec, array_of(out))

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
        """Choose a token for each row of `logits`, float32 [R, V]."""
        from engine.sampler import sample

        return sample(array_of(logits), rows)

    def synchronize(self) -> None:
        """Operations are done when they return."""


def _checked(inputs: StepInputs, kv: KVLayer, spec: AttentionSpec) -> HostStepInputs:
    """`inputs`, if the step stays inside of the cache."""
    assert isinstance(inputs, HostStepInputs), f"{type(inputs).__name__} was not prepared by this backend"
    blocks, block_size, kv_heads, head_dim = kv.key.shape
    if inputs.highest_block >= blocks or block_size != inputs.block_size:
        raise EngineError(
            f"a step up to block {inputs.highest_block} of {inputs.block_size} tokens does not fit "
            f"a cache of {blocks} blocks of {block_size}"
        )
    if kv_heads != spec.num_kv_heads or head_dim != spec.head_dim:
        raise EngineError(
            f"a cache of {kv_heads} heads of {head_dim} does not fit "
            f"attention over {spec.num_kv_heads} of {spec.head_dim}"
        )
    return inputs
