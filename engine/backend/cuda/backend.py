"""The `Backend` protocol on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.backend.cuda import attention as attention_module
from engine.backend.cuda import inputs as inputs_module
from engine.backend.cuda import linear as linear_module
from engine.backend.cuda import sampling as sampling_module
from engine.backend.cuda.device import CudaDevice
from engine.backend.cuda.graphs import StepGraphs
from engine.backend.cuda.loading import WeightUploader
from engine.backend.cuda.reservation import reserve_step
from engine.backend.cuda.staging import PinnedBuffer, Staging
from engine.backend.cuda.tensor import CudaTensor, address_of
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
    WeightFormat,
)
from engine.memory.cuda.pinned import PinnedMemoryResource
from engine.memory.cuda.resources import account_of
from engine.memory.cuda.runtime import BoundCudaRuntime
from engine.memory.scope import allocation_helper, memory_scope

if TYPE_CHECKING:
    from cuda.core import MemoryResource

    from engine.sampler import PendingTokens, SamplingRow

_MODULES = (
    "elementwise",
    "rope",
    "repack",
    "attention_decode",
    "attention_prefill",
    "attention_any",
    "sampling",
    "tiling",
)
_ROW_THREADS = 256
_ROPE_HEADS = 4
"""heads that a block of rope_and_store_kv takes"""
_SILU_COLUMNS = 8 * _ROW_THREADS
"""columns that a block of silu_and_mul takes at once"""


class CudaBackend:
    """Runs a model on one GPU, in bfloat16 with float32 accumulation.

    bfloat16 and not float16: its range is float32's, so no activation overflows (Qwen's residuals pass
    65504), and every product of an E2M1 code and an E4M3 scale is exact in it.

    Parameters
    ----------
    memory
        Gives every device byte: weights, caches, workspace, scratch. Nothing is allocated during a step. If
        it is a CUDA resource of the memory house, or an adaptor over one, that one's account counts what
        kernels and stream take, and both know of a lost context.
    device
        Index of the GPU.
    cache_dir
        Where compiled kernels are kept between runs; None: nowhere.
    host_memory
        Gives the pinned host buffers: two of 16 MiB while weights are loaded, then one step's inputs,
        twice. By default cudaHostAlloc.
    graphs
        Whether decode steps run as CUDA graphs.

    Raises
    ------
    ConfigurationError
        If there is no usable GPU, driver or compiler, or the GPU is too old.
    """

    name = "cuda"
    activation_dtype = DType.BFLOAT16

    def __init__(
        self,
        memory: MemoryResource,
        *,
        device: int = 0,
        cache_dir: Path | None = None,
        host_memory: MemoryResource | None = None,
        graphs: bool = False,
    ) -> None:
        account = account_of(memory)
        with nullcontext() if account is None else account.library_step():
            self.device = CudaDevice(device, cache_dir, account)
        self._memory = memory
        if host_memory is None:
            runtime = BoundCudaRuntime(device) if account is None else account.runtime
            host_memory = PinnedMemoryResource(runtime, self.device.health)
        self._host_memory = host_memory
        self._staging = Staging(self.device, host_memory)
        self._uploader = WeightUploader(self.device, memory, self._staging)
        self._linear = linear_module.LinearOperation(self.device)
        self._attention = attention_module.AttentionOperation(self.device)
        self._sampling = sampling_module.SamplingOperation(self.device)
        self._graphs = StepGraphs(self.device, enabled=graphs)
        self._inputs: inputs_module.InputWriter | None = None
        self._pinned: list[PinnedBuffer] = []
        self._workspace: list[CudaTensor] = []
        for module in _MODULES:
            self.device.load(module)

    @property
    def runs_ahead(self) -> bool:
        """Steps are launched as a whole. Launching kernel by kernel takes as long as a small step."""
        return self._graphs.enabled

    # -- memory --------------------------------------------------------------------------------------------

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory held now."""
        return self._staging.nbytes + sum(buffer.size for buffer in self._pinned)

    @allocation_helper
    def empty(self, shape: tuple[int, ...], dtype: DType) -> CudaTensor:
        """Uninitialised tensor, tagged by the current memory scope."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return CudaTensor.of(self.device.allocate(self._memory, size), shape, dtype)

    @allocation_helper
    def from_host(self, array: np.ndarray, dtype: DType) -> CudaTensor:
        """Copy of `array` on the device; it holds `dtype`'s values in its NumPy carrier."""
        assert array.dtype == dtype.carrier, (
            f"{dtype.label} travels as {dtype.carrier.__name__}, not {array.dtype}"
        )
        tensor = self.empty(array.shape, dtype)
        self._staging.upload(tensor.address, array)
        return tensor

    def to_host(self, tensor: Tensor) -> np.ndarray:
        """Copy on the host in `dtype`'s NumPy carrier. Waits for the device."""
        data = self._staging.download(address_of(tensor), tensor.nbytes)
        return data.view(tensor.dtype.carrier).reshape(tensor.shape)

    @allocation_helper
    def load_linear(self, parts: Sequence[LinearSource]) -> Linear:
        """One resident linear out of parts stacked along N; neighbours of one format share a buffer."""
        self._linear.load(parts)
        return self._uploader.load(parts)

    def as_table(self, linear: Linear) -> Tensor:
        """The BF16 linear's own bytes as an embedding table [N, K].

        Raises
        ------
        ValueError
            If the linear is of another format.
        """
        assert isinstance(linear, linear_module.CudaLinear)
        if len(linear.segments) != 1 or linear.segments[0].format is not WeightFormat.BF16:
            raise ValueError("only a BF16 linear can serve as an embedding table")
        return linear.segments[0].weight

    def reserve(self, limits: StepLimits) -> None:
        """Allocate io buffers and kernel scratch for steps up to `limits`, and give back the loading buffers.

        Raises
        ------
        ConfigurationError
            If the cache's block size is not a multiple of 16.
        """
        self._staging.close()
        self.device.load_kernels()
        memory = reserve_step(limits, self.device.shape, self._linear.arranged, self._reserve)
        self.device.clear(memory.linear_arrived.address, memory.linear_arrived.nbytes)
        self._linear.reserve(memory.linear_partials, memory.linear_arrived, memory.linear_arranged)
        self._attention.reserve(memory.attention_partials, memory.attention_states)
        self._sampling.reserve(memory.sampling, self._pin(memory.sampling.nbytes), limits.max_logits_rows)
        pinned = (self._pin(memory.io.nbytes), self._pin(memory.io.nbytes))
        self._inputs = inputs_module.InputWriter(self.device, memory.io, pinned, limits)
        self._graphs.reserve(limits)

    @allocation_helper
    def _reserve(self, tag: str, size: int) -> CudaTensor:
        with memory_scope(tag):
            tensor = self.empty((size,), DType.UINT8)
        self._workspace.append(tensor)
        return tensor

    def _pin(self, size: int) -> PinnedBuffer:
        with memory_scope("io/pinned"):
            buffer = PinnedBuffer(self.device, self._host_memory, size)
        self._pinned.append(buffer)
        return buffer

    def close(self) -> None:
        """Give back what the backend itself holds. Idempotent."""
        if self.device.stream.is_closed:
            return
        self._graphs.close()
        self._staging.close()
        for buffer in self._pinned:
            buffer.close()
        self._pinned.clear()
        for tensor in self._workspace:
            tensor.buffer.close()
        self._workspace.clear()
        self._inputs = None
        self.device.close()

    # -- one step ------------------------------------------------------------------------------------------

    def prepare(self, batch: StepBatch) -> StepInputs:
        """Send the step's inputs to the device."""
        assert self._inputs is not None, "reserve() comes before prepare()"
        return self._inputs.write(batch, self._graphs.bucket_of(batch))

    def run(self, forward: Callable[[StepInputs], Tensor], inputs: StepInputs) -> Tensor:
        """What `forward` returns for `inputs`: kernel by kernel, or as a graph of them."""
        assert isinstance(inputs, inputs_module.CudaStepInputs)
        return self._graphs.run(forward, inputs, inputs.bucket).rows(inputs.wanted_rows)

    def embedding(self, token_ids: Tensor, table: Tensor, *, out: Tensor) -> None:
        """``out[t] = table[token_ids[t]]``"""
        self._rows("embedding", out, address_of(token_ids), address_of(table), address_of(out), out.shape[1])

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        """``out[r] = x[rows[r]]``"""
        self._rows("gather_rows", out, address_of(x), address_of(rows), address_of(out), out.shape[1])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
        """``out = x / sqrt(mean(x²) + eps) * weight``"""
        self._rows(
            "rms_norm", out, address_of(x), address_of(weight), address_of(out), out.shape[1], np.float32(eps)
        )

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, *, out: Tensor
    ) -> None:
        """``residual += delta`` in place, then ``out = rms_norm(residual)``."""
        addresses = (address_of(residual), address_of(delta), address_of(weight), address_of(out))
        self._rows("add_rms_norm", out, *addresses, out.shape[1], np.float32(eps))

    def _rows(self, name: str, out: Tensor, *arguments: int | np.float32) -> None:
        if out.shape[0]:
            self.device.launch(
                self.device.kernel("elementwise", name), (out.shape[0],), _ROW_THREADS, *arguments
            )

    def silu_and_mul(self, gate_up: Tensor, *, out: Tensor) -> None:
        """``out = silu(gate_up[:, :I]) * gate_up[:, I:]``"""
        tokens, columns = out.shape
        if tokens:
            grid = (tokens, -(-columns // _SILU_COLUMNS))
            kernel = self.device.kernel("elementwise", "silu_and_mul")
            self.device.launch(kernel, grid, _ROW_THREADS, address_of(gate_up), address_of(out), columns)

    def linear(self, x: Tensor, weight: Linear, *, out: Tensor) -> None:
        """``out = x @ W.T + bias``; out BFLOAT16 or FLOAT32."""
        assert isinstance(weight, linear_module.CudaLinear)
        self._linear(x, weight, out)

    def rope_and_store_kv(self, qkv: Tensor, inputs: StepInputs, kv: KVLayer, spec: AttentionSpec) -> None:
        """Norm q and k per head where the spec asks, rotate them, store k and v in the paged cache."""
        if inputs.num_tokens == 0:
            return
        self.device.launch(
            self.device.kernel("rope", "rope_and_store_kv"),
            (inputs.num_tokens, -(-(spec.num_heads + 2 * spec.num_kv_heads) // _ROPE_HEADS)),
            32 * _ROPE_HEADS,
            address_of(qkv),
            address_of(inputs.positions),
            address_of(inputs.slot_mapping),
            address_of(kv.key),
            address_of(kv.value),
            address_of(spec.inv_freq),
            address_of(spec.q_norm) if spec.q_norm else 0,
            address_of(spec.k_norm) if spec.k_norm else 0,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            np.float32(spec.rope_magnitude),
            np.float32(spec.norm_eps),
            np.float32(kv.key_scale),
            np.float32(kv.value_scale),
            attention_module.KV_TYPES[kv.key.dtype],
        )

    def attention(
        self, qkv: Tensor, inputs: StepInputs, kv: KVLayer, spec: AttentionSpec, *, out: Tensor
    ) -> None:
        """Causal attention of the q part of `qkv` over the paged cache."""
        assert isinstance(inputs, inputs_module.CudaStepInputs)
        self._attention(qkv, inputs, kv, spec, out)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> PendingTokens:
        """Choose a token for each row of `logits`."""
        return self._sampling(logits, rows)

    def synchronize(self) -> None:
        """Wait for the device. Raises the device's error, if it has one."""
        self.device.synchronize()
