"""From a GGUF file or a 16-bit checkpoint to a ModelOpt NVFP4 checkpoint, with or without a calibration
text."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from engine.backend.cpu import CpuBackend
from engine.backend.keeping import KeepingBackend
from engine.backend.protocol import Backend, DType, KVLayer
from engine.errors import CheckpointError, ConfigurationError
from engine.memory.resources import HostMemoryResource, host_capacity
from engine.memory.scope import memory_scope
from engine.model.loader import WeightLoader
from engine.model.registry import model_class
from engine.model.tokenizer import Tokenizer
from engine.quantizer.calibration import CalibrationText, QuantizedLinear, QuantizingBackend
from engine.quantizer.gguf_source import convert_gguf
from engine.quantizer.modelopt import KVScales, declare, hf_quant_config, write_kv_scales, write_linear
from engine.quantizer.nvfp4 import amax_global_scale, quantize
from engine.quantizer.source import Source
from engine.quantizer.writer import SHARD_BYTES, CheckpointWriter, UnwritableError, new_directory

__all__ = ["QuantizeReport", "quantize_model"]

Progress = Callable[[str, int, int], None]
"""told a label, the bytes of weights done and all of them"""

_ALWAYS_EXCLUDED = ("lm_head", "model.embed_tokens")


@dataclass(slots=True)
class QuantizeReport:
    """What was made."""

    out: Path
    quantized: list[str] = field(default_factory=list)
    """linears in NVFP4"""
    excluded: list[str] = field(default_factory=list)
    """linears of the decoder layers that stay in BF16: K is no multiple of 16"""
    calibration_tokens: int = 0
    parameters: int = 0
    nbytes: int = 0
    """of all safetensors files"""


def quantize_model(
    source: Path,
    out: Path,
    *,
    calibration: str | None = None,
    force: bool = False,
    threads: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantise `source` into the directory `out`, which appears when it is complete.

    Parameters
    ----------
    source
        GGUF file, or directory with config.json and BF16, FP16 or FP32 safetensors.
    calibration
        Text to calibrate on; None: scales by the weights' squared error alone. The first
        ``MAX_SEQUENCES * SEQUENCE_TOKENS`` tokens are used.
    force
        Replace a checkpoint in `out`.

    Raises
    ------
    CheckpointError
        `source` is damaged, or is no model that can be quantised (`UnsupportedModelError`); or `out` cannot
        be written (`UnwritableError`): nothing is left of it.
    ConfigurationError
        `out` is not empty and `force` is not given, or holds `source` or anything but a checkpoint; or the
        calibration text is too short.
    """
    tell = progress or _silent
    if Path(os.path.realpath(source)).is_relative_to(os.path.realpath(out)):
        raise ConfigurationError(f"--out {out}: --model is in it; expected another directory")
    with new_directory(out, force=force) as directory:
        if not source.is_file():
            return _quantize(source, directory, out, calibration, threads, shard_bytes, tell)
        with tempfile.TemporaryDirectory(prefix=".unpacked-", dir=directory) as unpacked:
            label = f"read {source.name}"
            convert_gguf(source, Path(unpacked), lambda done, total: tell(label, done, total))
            try:
                return _quantize(Path(unpacked), directory, out, calibration, threads, shard_bytes, tell)
            except UnwritableError:
                raise
            except CheckpointError as error:
                # What was unpacked is gone when this is read: the GGUF file is at fault.
                raise type(error)(str(error).replace(unpacked, str(source))) from None


def _quantize(
    source_directory: Path,
    directory: Path,
    out: Path,
    calibration: str | None,
    threads: int | None,
    shard_bytes: int,
    progress: Progress,
) -> QuantizeReport:
    source = Source(source_directory)
    source.check_complete()
    stacks = source.stacks()
    report = QuantizeReport(out)
    report.quantized = [module for stack in stacks if stack.quantizable for module in stack.modules]
    report.excluded = [module for stack in stacks if not stack.quantizable for module in stack.modules]
    if not report.quantized:
        raise CheckpointError(f"{source_directory}: no linear of the decoder layers can be quantised")
    excluded = [*_ALWAYS_EXCLUDED, *report.excluded]
    weights = {f"{module}.weight" for module in report.quantized}

    with CheckpointWriter(directory, shard_bytes) as writer:
        for name in source.tensors:
            if name not in weights:
                writer.add(name, source.bfloat16(name))
        if calibration is None:
            kv_scales = _quantize_weights(source, writer, progress)
        else:
            kv_scales, report.calibration_tokens = _quantize_calibrated(
                source, writer, frozenset(report.quantized), calibration, threads, progress
            )
        for layer, scales in enumerate(kv_scales):
            write_kv_scales(writer, f"model.layers.{layer}", scales)
        writer.finish()
        config = {**source.config, "dtype" if "dtype" in source.config else "torch_dtype": "bfloat16"}
        writer.write_json("config.json", declare(config, excluded))
        writer.write_json("hf_quant_config.json", hf_quant_config(excluded))
    for path in source.companions():
        shutil.copyfile(path, directory / path.name)
    report.parameters = source.parameters
    report.nbytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return report


def _quantize_weights(source: Source, writer: CheckpointWriter, progress: Progress) -> list[KVScales]:
    """Scales of least squared error; activations are not observed."""
    stacks = [stack for stack in source.stacks() if stack.quantizable]
    sizes = {m: source.tensors[f"{m}.weight"].nbytes for stack in stacks for m in stack.modules}
    done, total = 0, sum(sizes.values())
    for stack in stacks:
        weights = [source.weight(module) for module in stack.modules]
        global_scale = amax_global_scale(*weights)
        for module, weight in zip(stack.modules, weights, strict=True):
            write_linear(writer, module, quantize(weight, global_scale=global_scale), None)
            done += sizes[module]
            progress("quantize", done, total)
    return [KVScales()] * int(source.config["num_hidden_layers"])


def _quantize_calibrated(
    source: Source,
    writer: CheckpointWriter,
    modules: frozenset[str],
    text: str,
    threads: int | None,
    progress: Progress,
) -> tuple[list[KVScales], int]:
    """One pass of the model over the text. Returns the KV scales of the layers and the number of tokens."""
    checkpoint, config = source.checkpoint, source.checkpoint.config
    tokenizer = Tokenizer.open(source.path)
    prefix = tokenizer.encode("")
    try:
        calibration = CalibrationText.cut(prefix, tokenizer.encode(text, add_special_tokens=False))
    except ValueError as error:
        raise ConfigurationError(f"--calibration: {error}") from None
    sizes = {module: source.tensors[f"{module}.weight"].nbytes for module in modules}
    done, total = 0, sum(sizes.values())

    def sink(linear: QuantizedLinear) -> None:
        nonlocal done
        write_linear(writer, linear.module, linear.weight, linear.input_amax)
        done += sizes[linear.module]
        progress("quantize", done, total)

    limits = calibration.limits(config.vocab_size)
    memory = HostMemoryResource(host_capacity())

    def make_backend() -> Backend:
        return cast(Backend, KeepingBackend(CpuBackend(memory, threads=threads)))

    backend = QuantizingBackend(
        make_backend(), make_backend, modules, source.weight, calibration.token_weights(), sink
    )
    try:
        model = model_class(config.architecture)(config, WeightLoader(checkpoint, config, backend), backend)
        model.reserve(limits)
        backend.reserve(limits)
        blocks = limits.max_seqs * limits.max_blocks_per_seq
        shape = (blocks, limits.block_size, config.num_kv_heads, config.head_dim)
        with memory_scope("kv/calibration"):
            # Layers run one after the other and each fills its own cache first: one is enough for all.
            cache = KVLayer(backend.empty(shape, DType.FLOAT32), backend.empty(shape, DType.FLOAT32))
        model.forward(backend.prepare(calibration.batch(limits)), [cache] * config.num_layers)
    finally:
        backend.close()
    missing = modules - backend.seen
    if missing:
        raise CheckpointError(f"{source.path}: {min(missing)} was not used by the model")
    return backend.kv_scales, calibration.token_ids.size


def _silent(label: str, done: int, total: int) -> None:
    pass
