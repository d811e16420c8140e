"""Finds the quantisation that a checkpoint's configuration declares, and who wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.files import read_json, shown
from engine.model.json_fields import Fields
from engine.model.quantization import compressed_tensors, modelopt
from engine.model.quantization.declaration import Declaration

__all__ = ["read_declaration"]


def read_declaration(path: Path, config: Mapping[str, Any]) -> Declaration:
    """What config.json (`config`) of the checkpoint in `path` declares, else hf_quant_config.json.

    Raises
    ------
    CheckpointError
        A field is missing or absurd.
    UnsupportedModelError
        The quantisation is not served.
    """
    source = str(path / "config.json")
    fields = Fields(config, source).object("quantization_config")
    if fields is not None:
        method = fields.text("quant_method", "modelopt" if fields.get("quant_algo") else None)
        if method == "modelopt":
            return modelopt.read_declaration(fields, source)
        if method == "compressed-tensors":
            return compressed_tensors.read_declaration(fields, source)
        raise UnsupportedModelError(
            f"{source}: quantization_config.quant_method: {shown(method)} is not served; "
            "expected modelopt or compressed-tensors"
        )
    legacy = path / "hf_quant_config.json"
    if legacy.exists():
        nested = Fields(read_json(legacy), str(legacy)).object("quantization")
        if nested is not None:
            return modelopt.read_declaration(nested, str(legacy))
    return Declaration(source)
