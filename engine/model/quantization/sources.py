"""`LinearSource`s out of a checkpoint. The tensors that are present decide the format."""

from __future__ import annotations

from collections.abc import Iterator

from engine.backend.protocol import LinearSource, WeightFormat
from engine.errors import CheckpointError, UnsupportedModelError
from engine.model.checkpoint import Checkpoint
from engine.model.files import text_shown
from engine.model.quantization import fp8, nvfp4
from engine.model.quantization.tensors import read_bfloat16, read_float32

__all__ = ["check_declaration", "has_linear", "is_same_weight", "linear_source", "stored_format"]

_KNOWN = frozenset(
    {
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_scale_2",
        "weight_global_scale",
        "bias",
        # Activations stay 16-bit, whatever they were calibrated for.
        "input_scale",
        "input_global_scale",
        "output_scale",
        # The KV cache's: `engine.model.kv_scales` reads them.
        "k_scale",
        "v_scale",
        "q_scale",
    }
)
_SHOWN = 4


def has_linear(checkpoint: Checkpoint, module: str) -> bool:
    """Whether the checkpoint holds a weight of `module`, in any format."""
    return f"{module}.weight" in checkpoint or f"{module}.weight_packed" in checkpoint


def is_same_weight(checkpoint: Checkpoint, module: str, other: str) -> bool:
    """Whether `module` has the dense weight of `other`, element by element, and no bias."""
    names = f"{module}.weight", f"{other}.weight"
    if f"{module}.bias" in checkpoint or not all(name in checkpoint for name in names):
        return False
    first, second = (checkpoint.stored(name) for name in names)
    if first.dtype not in ("BF16", "F16", "F32") or (first.dtype, first.shape) != (
        second.dtype,
        second.shape,
    ):
        return False
    return checkpoint.is_equal(*names)


def stored_format(checkpoint: Checkpoint, module: str) -> WeightFormat:
    """How the linear `module` is stored. Raises CheckpointError if it is not there."""
    if nvfp4.codes_name(checkpoint, module) is not None:
        return WeightFormat.NVFP4
    if fp8.is_stored(checkpoint, module):
        return WeightFormat.FP8
    checkpoint.stored(f"{module}.weight")
    return WeightFormat.BF16


def linear_source(checkpoint: Checkpoint, module: str, rows: int, cols: int) -> LinearSource:
    """The linear layer `module`, [rows, cols].

    Dense weights are bfloat16: FP16 and FP32 are rounded to it.

    Raises
    ------
    CheckpointError
        A tensor is missing, or its shape or element type contradicts config.json.
    UnsupportedModelError
        It is stored in a format that is not served, or a tensor beside the weight would change what the layer
        computes: smoothing, low-rank residuals, zero points.
    """
    for name in checkpoint.below(module):
        suffix = name.rpartition(".")[2]
        if suffix not in _KNOWN:
            raise UnsupportedModelError(
                f"{checkpoint.stored(name).file}: tensor {text_shown(name)}: "
                f"a linear layer with {text_shown(suffix)} is not served"
            )
    bias_name = f"{module}.bias"
    bias = None
    if bias_name in checkpoint:
        bias = read_float32(checkpoint, bias_name, (rows,))
    elif module.rpartition(".")[2] in checkpoint.config.biased:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {bias_name} is missing; {checkpoint.config.architecture} has it "
            "by its config.json"
        )
    kind = stored_format(checkpoint, module)
    if kind is WeightFormat.NVFP4:
        return nvfp4.read(checkpoint, module, (rows, cols), bias)
    if kind is WeightFormat.FP8:
        return fp8.read(checkpoint, module, (rows, cols), bias)
    weight = f"{module}.weight"
    for scale in ("weight_scale", "weight_scale_2", "weight_global_scale"):
        if f"{module}.{scale}" in checkpoint:
            stored = checkpoint.stored(weight)
            raise UnsupportedModelError(
                f"{stored.file}: tensor {weight}: {stored.dtype} with {scale} is not served"
            )
    values = read_bfloat16(checkpoint, weight, (rows, cols))
    return LinearSource(module, WeightFormat.BF16, (rows, cols), values, bias=bias)


def check_declaration(checkpoint: Checkpoint) -> None:
    """Compare what the configuration declares with the tensors, and with what is served; warn once, by name,
    where they disagree.

    Raises
    ------
    CheckpointError
        A format is declared that no tensor is stored in: the first that should be is named.
    """
    declaration = checkpoint.declaration
    if declaration.unserved_kv_cache is not None:
        checkpoint.log.warning(
            "%s: a KV cache in %s is not served; it is stored in what was asked for, else in bfloat16",
            declaration.source,
            declaration.unserved_kv_cache,
        )
    stored = {module: stored_format(checkpoint, module) for module in _linears(checkpoint)}
    declared = {module: declaration.format_of(module) for module in stored}
    for weight_format in sorted(declaration.formats - set(stored.values()), key=lambda f: f.value):
        module = next((name for name, kind in declared.items() if kind is weight_format), None)
        if module is not None:
            raise CheckpointError(
                f"{declaration.source}: declares {weight_format.value.upper()}, but tensor "
                f"{text_shown(module)}.weight_scale is missing: no linear is stored in it"
            )
    others = [module for module, kind in stored.items() if declared[module] is not kind]
    if others:
        said = ", ".join(
            f"{text_shown(module)} is {stored[module].name}, declared {declared[module].name}"
            for module in others[:_SHOWN]
        )
        more = f", and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        checkpoint.log.warning(
            "%s disagrees with the tensors, which decide: %s%s", declaration.source, said, more
        )


def _linears(checkpoint: Checkpoint) -> Iterator[str]:
    """Every module with a matrix of weights. Embeddings are matrices too, but no linears."""
    for name, tensor in checkpoint.tensors.items():
        module, _, suffix = name.rpartition(".")
        if (
            suffix in ("weight", "weight_packed")
            and len(tensor.shape) == 2
            and not module.endswith("embed_tokens")
        ):
            yield module
