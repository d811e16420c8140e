"""NVIDIA ModelOpt's quantisation, as it is written in config.json or in hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from engine.backend.protocol import WeightFormat
from engine.errors import UnsupportedModelError
from engine.model.files import shown, text_shown
from engine.model.json_fields import Fields
from engine.model.quantization.declaration import GROUP_SIZE, Declaration

__all__ = ["read_declaration"]

_FORMATS = {
    "NVFP4": WeightFormat.NVFP4,
    # The same weights, whatever becomes of the activations: they stay 16-bit here.
    "W4A16_NVFP4": WeightFormat.NVFP4,
    "W4A8_NVFP4_FP8": WeightFormat.NVFP4,
    "FP8": WeightFormat.FP8,
}


def read_declaration(fields: Fields, source: str) -> Declaration:
    """The declaration in `fields`: config.json's ``quantization_config``, or hf_quant_config.json's
    ``quantization``. The latter calls ``ignore`` ``exclude_modules``, and ``kv_cache_scheme``
    ``kv_cache_quant_algo``.

    Raises
    ------
    CheckpointError
        A field is missing or absurd.
    UnsupportedModelError
        An algorithm or a group size is not served.
    """
    algorithm = fields.get("quant_algo")
    if algorithm is None:  # only the KV cache is quantised
        formats: set[WeightFormat] = set()

        def format_of(module: str) -> WeightFormat:
            return WeightFormat.BF16

    elif algorithm == "MIXED_PRECISION":
        layers = _quantized_layers(fields, source)
        formats = set(layers.values())

        def format_of(module: str) -> WeightFormat:
            return layers.get(module, WeightFormat.BF16)

    else:
        declared = _format(fields, source, "quant_algo")
        formats = {declared}
        patterns = fields.names("ignore") + fields.names("exclude_modules")
        is_excluded = _matcher(patterns)

        def format_of(module: str) -> WeightFormat:
            return WeightFormat.BF16 if is_excluded(module) else declared

    fp8, unserved = _kv_cache(fields)
    return Declaration(source, format_of, frozenset(formats), fp8, unserved)


def _matcher(patterns: list[str]) -> Callable[[str], bool]:
    """Globs over the checkpoint's own names. One without a star may name a module above the linear."""

    def is_excluded(module: str) -> bool:
        return any(fnmatchcase(module, p) or module.startswith(f"{p}.") for p in patterns)

    return is_excluded


def _quantized_layers(fields: Fields, source: str) -> dict[str, WeightFormat]:
    layers = fields.object("quantized_layers")
    if layers is None:
        raise fields.fault("quantized_layers", "an object of layers and their quant_algo")
    formats = {}
    for name in layers.raw:
        entry = layers.object(name)
        if entry is None:
            raise layers.fault(name, "an object with quant_algo")
        formats[name] = _format(entry, source, f"quantized_layers.{text_shown(name)}.quant_algo")
    return formats


def _format(fields: Fields, source: str, where: str) -> WeightFormat:
    algorithm = fields.text("quant_algo")
    if algorithm not in _FORMATS:
        raise UnsupportedModelError(
            f"{source}: {where}: {shown(algorithm)} is not served; expected NVFP4, FP8 or MIXED_PRECISION"
        )
    if _FORMATS[algorithm] is WeightFormat.NVFP4 and fields.count("group_size", GROUP_SIZE) != GROUP_SIZE:
        raise UnsupportedModelError(
            f"{source}: {where.replace('quant_algo', 'group_size')}: {fields.get('group_size')} "
            f"is not served; NVFP4 has groups of {GROUP_SIZE}"
        )
    return _FORMATS[algorithm]


def _kv_cache(fields: Fields) -> tuple[bool, str | None]:
    scheme = fields.object("kv_cache_scheme")
    if scheme is not None:
        return kv_cache_scheme(scheme)
    algorithm = fields.get("kv_cache_quant_algo")
    if algorithm is None:
        return False, None
    return (True, None) if algorithm == "FP8" else (False, shown(algorithm))


def kv_cache_scheme(scheme: Fields) -> tuple[bool, str | None]:
    """Whether ``kv_cache_scheme`` is FP8 per tensor, else what it is. Both formats spell it alike."""
    bits, kind = scheme.get("num_bits"), scheme.get("type")
    strategy, dynamic = scheme.get("strategy"), scheme.get("dynamic")
    if bits == 8 and kind == "float" and strategy in (None, "tensor") and not dynamic:
        return True, None
    return False, shown({"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": dynamic})
