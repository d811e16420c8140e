"""What ModelOpt and compressed-tensors write of quantisation, in their spellings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.backend.protocol import WeightFormat
from engine.errors import CheckpointError, UnsupportedModelError
from engine.model.quantization.declaration import Declaration
from engine.model.quantization.read_declaration import read_declaration
from tests.model.checkpoint_files import NVFP4_GROUP

NVFP4, FP8, BF16 = WeightFormat.NVFP4, WeightFormat.FP8, WeightFormat.BF16
GATE, QUERY = "model.layers.0.mlp.gate_proj", "model.layers.10.self_attn.q_proj"
FP8_GROUP = {
    "targets": ["re:.*self_attn.*"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
}


def read(path: Path, quantization: Any = None, legacy: Any = None) -> Declaration:
    if legacy is not None:
        (path / "hf_quant_config.json").write_text(json.dumps(legacy))
    config = {} if quantization is None else {"quantization_config": quantization}
    return read_declaration(path, json.loads(json.dumps(config)))


def modelopt(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", **fields}


def compressed(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": NVFP4_GROUP}, **fields}


def group(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": {**NVFP4_GROUP["weights"], **weights}}}


# -- where it stands ---------------------------------------------------------------------------------------

LEGACY = {
    "producer": {"name": "modelopt"},
    "quantization": {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    },
}


def test_config_json_is_read_first(tmp_path: Path) -> None:
    declaration = read(tmp_path, modelopt(), LEGACY)
    assert declaration.formats == {NVFP4}
    assert not declaration.fp8_kv_cache
    assert declaration.source == str(tmp_path / "config.json")


def test_the_other_file_is_not_even_opened(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text("no JSON")
    assert read(tmp_path, modelopt()).formats == {NVFP4}
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: not JSON"):
        read(tmp_path)


def test_the_other_file_where_config_json_says_nothing(tmp_path: Path) -> None:
    declaration = read(tmp_path, None, LEGACY)
    assert declaration.formats == {FP8}
    assert declaration.fp8_kv_cache
    assert declaration.format_of("lm_head") is BF16
    assert declaration.format_of(GATE) is FP8
    assert declaration.source.endswith("hf_quant_config.json")


def test_neither(tmp_path: Path) -> None:
    declaration = read(tmp_path)
    assert declaration.formats == frozenset()
    assert declaration.format_of(GATE) is BF16
    assert not declaration.fp8_kv_cache


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "fp8"])
def test_other_methods_are_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"quantization_config\.quant_method: '{method}'"):
        read(tmp_path, {"quant_method": method})


def test_a_method_that_is_not_said_is_modelopts(tmp_path: Path) -> None:
    assert read(tmp_path, {"quant_algo": "NVFP4"}).formats == {NVFP4}
    with pytest.raises(CheckpointError, match=r"quantization_config\.quant_method: expected a string"):
        read(tmp_path, {"bits": 4})


# -- ModelOpt ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["ignore", "exclude_modules"])
@pytest.mark.parametrize(
    ("pattern", "excluded"),
    [
        ("lm_head", {"lm_head"}),
        ("*self_attn*", {QUERY}),
        ("model.layers.10*", {QUERY}),
        ("model.layers.1", set()),
        ("model.layers.10", {QUERY}),
        ("model.layers.10.self_attn", {QUERY}),
        ("model.layers.?.mlp.*", {GATE}),
        ("*.[gu]*_proj", {GATE}),
        ("*", {GATE, QUERY, "lm_head"}),
        ("LM_HEAD", set()),
        # Names as vLLM and others rename them, which are not the checkpoint's.
        ("model.layers.0.mlp.gate_up_proj", set()),
        ("layers.0.mlp.gate_proj", set()),
    ],
)
def test_excluded_modules_are_globs(tmp_path: Path, field: str, pattern: str, excluded: set[str]) -> None:
    declaration = read(tmp_path, modelopt(**{field: [pattern]}))
    found = {name for name in (GATE, QUERY, "lm_head") if declaration.format_of(name) is BF16}
    assert found == excluded


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"])
def test_activations_stay_whatever_is_said(tmp_path: Path, algorithm: str) -> None:
    assert read(tmp_path, modelopt(quant_algo=algorithm)).formats == {NVFP4}


@pytest.mark.parametrize("algorithm", ["INT4_AWQ", "NVFP4_AWQ", "MXFP4", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_other_algorithms_are_refused(tmp_path: Path, algorithm: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"quant_algo: '{algorithm}' is not served"):
        read(tmp_path, modelopt(quant_algo=algorithm))


def test_groups_are_of_16(tmp_path: Path) -> None:
    assert read(tmp_path, modelopt(group_size=16)).formats == {NVFP4}
    assert read(tmp_path, modelopt(group_size=None)).formats == {NVFP4}
    assert read(tmp_path, modelopt(quant_algo="FP8", group_size=128)).formats == {FP8}
    with pytest.raises(UnsupportedModelError, match=r"group_size: 32 is not served"):
        read(tmp_path, modelopt(group_size=32))


def test_mixed_precision_lists_its_layers(tmp_path: Path) -> None:
    """What is not in the list is BF16: there is no list of what is excluded."""
    layers = {
        GATE: {"quant_algo": "NVFP4", "group_size": 16},
        QUERY: {"quant_algo": "FP8"},
        "lm_head": {"quant_algo": "NVFP4"},
    }
    declaration = read(tmp_path, modelopt(quant_algo="MIXED_PRECISION", quantized_layers=layers))
    assert declaration.formats == {NVFP4, FP8}
    assert declaration.format_of(GATE) is NVFP4
    assert declaration.format_of(QUERY) is FP8
    assert declaration.format_of("lm_head") is NVFP4
    assert declaration.format_of("model.layers.0.mlp.down_proj") is BF16
    # Whole names, no globs and no beginnings.
    assert declaration.format_of(f"{GATE}.more") is BF16


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (None, "quantized_layers: expected an object of layers"),
        ([], "quantized_layers: expected an object"),
        ({GATE: None}, "expected an object with quant_algo"),
        ({GATE: "NVFP4"}, "expected an object"),
        ({GATE: {}}, "quant_algo: expected a string"),
        ({GATE: {"quant_algo": "INT8"}}, rf"quantized_layers\.{GATE}\.quant_algo: 'INT8' is not served"),
        ({GATE: {"quant_algo": "NVFP4", "group_size": 32}}, rf"{GATE}\.group_size: 32 is not served"),
    ],
)
def test_faulty_lists_of_layers(tmp_path: Path, layers: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read(tmp_path, modelopt(quant_algo="MIXED_PRECISION", quantized_layers=layers))


def test_only_the_cache_may_be_quantised(tmp_path: Path) -> None:
    declaration = read(tmp_path, modelopt(quant_algo=None, kv_cache_quant_algo="FP8"))
    assert declaration.formats == frozenset()
    assert declaration.fp8_kv_cache


@pytest.mark.parametrize("value", ["lm_head", [1], {"a": 1}])
def test_excluded_modules_are_a_list_of_names(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"quantization_config\.ignore: expected a list of strings"):
        read(tmp_path, modelopt(ignore=value))


# -- compressed-tensors ------------------------------------------------------------------------------------


def test_ignored_names_are_exact(tmp_path: Path) -> None:
    declaration = read(tmp_path, compressed(ignore=["lm_head", "model.layers.10.self_attn"]))
    assert declaration.formats == {NVFP4}
    assert declaration.format_of("lm_head") is BF16
    assert declaration.format_of("x.lm_head") is NVFP4
    assert declaration.format_of(QUERY) is NVFP4


def test_ignored_patterns_match_from_the_start(tmp_path: Path) -> None:
    declaration = read(tmp_path, compressed(ignore=[r"re:.*self_attn\.[qkv]_proj$", "re:mlp"]))
    assert declaration.format_of(QUERY) is BF16
    assert declaration.format_of("model.layers.10.self_attn.o_proj") is NVFP4
    assert declaration.format_of(GATE) is NVFP4, "it does not begin so"


def test_stars_are_no_globs(tmp_path: Path) -> None:
    assert read(tmp_path, compressed(ignore=["*self_attn*"])).format_of(QUERY) is NVFP4


def test_groups_by_their_targets(tmp_path: Path) -> None:
    """The first that matches: attention in FP8, all other linears in NVFP4."""
    groups = {"group_0": FP8_GROUP, "group_1": NVFP4_GROUP}
    declaration = read(tmp_path, compressed(config_groups=groups))
    assert declaration.formats == {NVFP4, FP8}
    assert declaration.format_of(QUERY) is FP8
    assert declaration.format_of(GATE) is NVFP4


def test_what_no_group_targets_is_bf16(tmp_path: Path) -> None:
    declaration = read(tmp_path, compressed(config_groups={"group_0": FP8_GROUP}))
    assert declaration.format_of(QUERY) is FP8
    assert declaration.format_of(GATE) is BF16


@pytest.mark.parametrize(
    "activations", [None, {"num_bits": 4, "type": "float", "dynamic": "local"}, {"num_bits": 8}]
)
def test_activations_of_a_group_do_not_matter(tmp_path: Path, activations: Any) -> None:
    groups = {"group_0": {**NVFP4_GROUP, "input_activations": activations}}
    assert read(tmp_path, compressed(config_groups=groups)).formats == {NVFP4}


def test_a_group_without_weights_quantises_none(tmp_path: Path) -> None:
    groups = {"group_0": NVFP4_GROUP, "group_1": {"targets": ["re:.*attn"], "weights": None}}
    assert read(tmp_path, compressed(config_groups=groups)).formats == {NVFP4}


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 8},
        {"type": "int"},
        {"strategy": "group", "group_size": 128},
        {"group_size": 32},
        {"symmetric": False},
        {"num_bits": 8, "strategy": "channel"},
    ],
)
def test_other_weights_are_refused(tmp_path: Path, weights: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config_groups\.group_0\.weights: .* is not served"):
        read(tmp_path, compressed(config_groups=group(**weights)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"config_groups": None}, "config_groups: expected an object of groups"),
        ({"config_groups": {"group_0": None}}, "config_groups.group_0: expected an object with targets"),
        ({"config_groups": {"group_0": 3}}, "config_groups.group_0: expected an object"),
        ({"ignore": ["re:("]}, "ignore: '[(]' is no regular expression"),
        ({"ignore": [None]}, "ignore: expected a list of strings"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: not served"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config: not served"),
    ],
)
def test_faulty_groups(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read(tmp_path, compressed(**fields))


def test_empty_extras_are_none(tmp_path: Path) -> None:
    fields = {"sparsity_config": {}, "transform_config": {}}
    assert read(tmp_path, compressed(**fields)).formats == {NVFP4}
    assert read(tmp_path, compressed(sparsity_config={"format": "dense"})).formats == {NVFP4}


# -- the cache, which both spell alike ---------------------------------------------------------------------


@pytest.mark.parametrize("make", [modelopt, compressed])
@pytest.mark.parametrize(
    ("scheme", "fp8", "unserved"),
    [
        (None, False, None),
        ({"dynamic": False, "num_bits": 8, "type": "float"}, True, None),
        ({"dynamic": False, "num_bits": 8, "type": "float", "strategy": "tensor"}, True, None),
        ({"num_bits": 8, "type": "float", "strategy": "attn_head"}, False, "attn_head"),
        ({"num_bits": 8, "type": "int"}, False, "int"),
        ({"num_bits": 4, "type": "float"}, False, "4"),
        ({"num_bits": 8, "type": "float", "dynamic": True}, False, "'dynamic': True"),
    ],
)
def test_kv_cache_schemes(tmp_path: Path, make: Any, scheme: Any, fp8: bool, unserved: str | None) -> None:
    declaration = read(tmp_path, make(kv_cache_scheme=scheme))
    assert declaration.fp8_kv_cache is fp8
    if unserved is None:
        assert declaration.unserved_kv_cache is None
    else:
        assert unserved in str(declaration.unserved_kv_cache)


@pytest.mark.parametrize(
    ("algorithm", "fp8", "unserved"), [("FP8", True, None), ("NVFP4", False, "'NVFP4'"), (None, False, None)]
)
def test_modelopts_algorithm_of_the_cache(
    tmp_path: Path, algorithm: str | None, fp8: bool, unserved: str | None
) -> None:
    declaration = read(tmp_path, modelopt(kv_cache_quant_algo=algorithm))
    assert (declaration.fp8_kv_cache, declaration.unserved_kv_cache) == (fp8, unserved)


# -- as they were written ----------------------------------------------------------------------------------


def test_stored_declarations(shared_checkpoints: Path) -> None:
    for name, fp8 in (("qwen2/NVFP4-modelopt", True), ("llama-untied/NVFP4-FP8KV-ct", True)):
        path = shared_checkpoints / name
        declaration = read_declaration(path, json.loads((path / "config.json").read_text()))
        assert declaration.formats == {NVFP4}
        assert declaration.format_of(GATE) is NVFP4
        assert declaration.format_of("lm_head") is BF16
        assert declaration.fp8_kv_cache is fp8


def test_a_stored_mixed_declaration(shared_checkpoints: Path) -> None:
    path = shared_checkpoints / "llama-mixed" / "MIXED-modelopt"
    declaration = read_declaration(path, json.loads((path / "config.json").read_text()))
    assert declaration.formats == {NVFP4, FP8}
    assert declaration.format_of("lm_head") is NVFP4
    assert declaration.format_of("model.layers.0.self_attn.q_proj") is FP8
    assert declaration.format_of(GATE) is NVFP4
