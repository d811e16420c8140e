"""The compressed-tensors format (llm-compressor), as config.json's ``quantization_config`` declares it."""

from __future__ import annotations

from collections.abc import Callable

from engine.backend.protocol import WeightFormat
from engine.errors import UnsupportedModelError
from engine.model.files import shown, text_shown
from engine.model.json_fields import Fields
from engine.model.quantization.declaration import GROUP_SIZE, Declaration
from engine.model.quantization.modelopt import kv_cache_scheme
from engine.model.quantization.patterns import ModulePatterns

__all__ = ["read_declaration"]

_Match = Callable[[str], bool]


def read_declaration(fields: Fields, source: str) -> Declaration:
    """The declaration in ``quantization_config``. The first group whose targets match a linear is its own,
    unless ``ignore`` names it.

    Raises
    ------
    CheckpointError
        A field is missing or absurd, or a pattern is no regular expression. `Declaration.format_of` raises it
        for a pattern that takes too long.
    UnsupportedModelError
        The weights of a group, or a transform or sparsity of the whole, are not served.
    """
    for name in ("sparsity_config", "transform_config"):
        extra = fields.object(name)
        if extra is not None and extra.raw and extra.get("format") != "dense":
            raise UnsupportedModelError(
                f"{source}: quantization_config.{name}: not served; expected it empty or absent"
            )
    ignored = _matcher(fields, "ignore", source)
    groups = _groups(fields, source)

    def format_of(module: str) -> WeightFormat:
        if not ignored(module):
            for matches, weight_format in groups:
                if matches(module):
                    return weight_format
        return WeightFormat.BF16

    scheme = fields.object("kv_cache_scheme")
    fp8, unserved = (False, None) if scheme is None else kv_cache_scheme(scheme)
    return Declaration(source, format_of, frozenset(kind for _, kind in groups), fp8, unserved)


def _groups(fields: Fields, source: str) -> list[tuple[_Match, WeightFormat]]:
    config_groups = fields.object("config_groups")
    if config_groups is None:
        raise fields.fault("config_groups", "an object of groups")
    groups = []
    for name in config_groups.raw:
        group = config_groups.object(name)
        if group is None:
            raise config_groups.fault(name, "an object with targets and weights")
        where = f"quantization_config.config_groups.{text_shown(name)}"
        weights = group.object("weights")
        if weights is not None:  # a group may quantise activations or the attention's output only
            matches = _matcher(group, "targets", source)
            groups.append((matches, _format(weights, f"{source}: {where}.weights")))
    return groups


def _format(weights: Fields, where: str) -> WeightFormat:
    """By the properties of the weights: activations stay 16-bit, whatever is said about them."""
    wanted = {
        WeightFormat.NVFP4: {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": GROUP_SIZE,
            "symmetric": True,
        },
        WeightFormat.FP8: {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    }
    for weight_format, properties in wanted.items():
        if all(weights.get(name) == value for name, value in properties.items()):
            return weight_format
    found = {name: weights.get(name) for name in wanted[WeightFormat.NVFP4]}
    raise UnsupportedModelError(
        f"{where}: {shown(found)} is not served; expected NVFP4 (4-bit float, tensor_group of {GROUP_SIZE}) "
        "or FP8 (8-bit float, tensor), symmetric"
    )


def _matcher(fields: Fields, name: str, source: str) -> _Match:
    """Exact names, the class ``Linear`` (every linear), or ``re:`` and a pattern for the name's start."""
    entries = fields.names(name)
    exact = {entry for entry in entries if not entry.startswith("re:")}
    patterns = ModulePatterns(
        (entry.removeprefix("re:") for entry in entries if entry.startswith("re:")),
        f"{source}: quantization_config: {name}",
    )

    def matches(module: str) -> bool:
        return module in exact or "Linear" in exact or patterns.match(module)

    return matches
