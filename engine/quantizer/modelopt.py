"""ModelOpt's checkpoint format: tensor names and the two places where the quantisation is declared.

Spelled as NVIDIA ModelOpt's exporter does, so that engines which know its output read this:
``hf_quant_config.json`` and ``config.json``'s ``quantization_config``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from engine.quantizer.nvfp4 import E2M1_MAX, E4M3_MAX, GROUP_SIZE, NVFP4Weight
from engine.quantizer.writer import CheckpointWriter

__all__ = ["DEFAULT_INPUT_SCALE", "KVScales", "declare", "hf_quant_config", "write_kv_scales", "write_linear"]

DEFAULT_INPUT_SCALE = E4M3_MAX / (E2M1_MAX * E4M3_MAX)
"""of an activation that was not observed: as if its largest magnitude were 448. Weight-only engines ignore
it."""
_PRODUCER = {"name": "vtserve", "version": "0.1.0"}


@dataclass(frozen=True, slots=True)
class KVScales:
    """FP8 scales of one layer's keys and values: amax / 448 of what was observed, else 1."""

    key: float = 1.0
    value: float = 1.0

    @classmethod
    def of_amax(cls, key: float, value: float) -> KVScales:
        return cls(*(amax / E4M3_MAX if amax > 0 else 1.0 for amax in (key, value)))


def write_linear(
    writer: CheckpointWriter, module: str, weight: NVFP4Weight, input_amax: float | None
) -> None:
    """Write one NVFP4 linear: codes, group scales, global scale and activation scale."""
    observed = input_amax is not None and input_amax > 0
    input_scale = input_amax / (E2M1_MAX * E4M3_MAX) if observed and input_amax else DEFAULT_INPUT_SCALE
    writer.add(f"{module}.weight", weight.codes)
    writer.add(f"{module}.weight_scale", weight.group_scales.view(ml_dtypes.float8_e4m3fn))
    writer.add(f"{module}.weight_scale_2", np.array(weight.global_scale, np.float32))
    writer.add(f"{module}.input_scale", np.array(input_scale, np.float32))


def write_kv_scales(writer: CheckpointWriter, layer: str, scales: KVScales) -> None:
    """Write the KV cache scales of ``model.layers.N``."""
    writer.add(f"{layer}.self_attn.k_proj.k_scale", np.array(scales.key, np.float32))
    writer.add(f"{layer}.self_attn.v_proj.v_scale", np.array(scales.value, np.float32))


def hf_quant_config(excluded: Iterable[str]) -> dict[str, Any]:
    """The content of hf_quant_config.json. `excluded` are the linears that stay in BF16."""
    return {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": GROUP_SIZE,
            "exclude_modules": list(excluded),
        },
    }


def declare(config: Mapping[str, Any], excluded: Iterable[str]) -> dict[str, Any]:
    """`config` (a config.json) with its ``quantization_config``."""
    operand = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP_SIZE}
    quantization = {
        "config_groups": {
            "group_0": {"input_activations": operand, "weights": dict(operand), "targets": ["Linear"]},
        },
        "ignore": list(excluded),
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": _PRODUCER,
        "quant_method": "modelopt",
    }
    return {**config, "quantization_config": quantization}
