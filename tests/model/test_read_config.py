"""config.json in its spellings, one test for each thing that engines have got wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import CheckpointError, UnsupportedModelError
from engine.model.config import ModelConfig
from engine.model.read_config import read_model_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def read(generation: dict[str, Any] | None = None, /, **changes: Any) -> ModelConfig:
    # As a file gives it: JSON's own types.
    raw = json.loads(json.dumps({**BASE, **changes}))
    return read_model_config(raw, generation or {}, source="config.json")


def model(name: str) -> list[str]:
    return [f"{name}ForCausalLM"]


# -- heads -------------------------------------------------------------------------------------------------


def test_head_dim_is_read_where_it_is_given() -> None:
    assert read().head_dim == 32
    assert read(head_dim=64).head_dim == 64
    assert read(head_dim=None).head_dim == 32


def test_qwen3s_head_dim_is_128_where_it_is_not_given() -> None:
    assert read(architectures=model("Qwen3")).head_dim == 128
    assert read(architectures=model("Qwen3"), head_dim=32).head_dim == 32


def test_a_head_dim_that_does_not_follow_must_be_given() -> None:
    with pytest.raises(CheckpointError, match=r"head_dim: expected it, as hidden_size 130 is not a multiple"):
        read(hidden_size=130)
    assert read(hidden_size=130, head_dim=32).head_dim == 32
    with pytest.raises(CheckpointError, match="head_dim: 33 is odd"):
        read(head_dim=33)


def test_key_heads_divide_the_heads() -> None:
    assert read(num_key_value_heads=None).num_kv_heads == 4
    with pytest.raises(CheckpointError, match=r"num_attention_heads: 4 is not a multiple of .* 3"):
        read(num_key_value_heads=3)


# -- rotary embedding --------------------------------------------------------------------------------------

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def test_all_spellings_of_rope_are_one() -> None:
    old = read(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3})
    later = read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    new = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    nested = {"full_attention": new, "sliding_attention": new}
    both = read(rope_theta=1.5, rope_parameters=new)
    assert old.rope == later.rope == read(rope_parameters=new).rope == read(rope_parameters=nested).rope
    assert both.rope == old.rope
    assert old.rope.rope_type == "llama3"
    assert old.rope.theta == 5e5


def test_a_theta_that_is_not_given_is_10000() -> None:
    for config in (read(), read(rope_scaling=None), read(rope_parameters={}), read(rope_theta=None)):
        assert config.rope.theta == 10000.0
        assert config.rope.rope_type == "default"


def test_layers_of_different_embeddings_are_refused() -> None:
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(UnsupportedModelError, match=r"rope_parameters: layers of different embeddings"):
        read(rope_parameters=nested)


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "proportional", 3, {}])
def test_an_unknown_kind_of_rope_is_refused(kind: Any) -> None:
    for field in ("rope_scaling", "rope_parameters"):
        with pytest.raises(UnsupportedModelError, match=r"^config\.json: rope_type: .* is not served"):
            read(**{field: {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize("missing", sorted(LLAMA3))
def test_llama3_needs_all_its_numbers(missing: str) -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != missing}
    with pytest.raises(CheckpointError, match=rf"rope_scaling\.{missing}: expected a positive .* nothing"):
        read(rope_scaling={"rope_type": "llama3", **scaling})


def test_llama3s_bounds_are_in_order() -> None:
    with pytest.raises(CheckpointError, match=r"low_freq_factor: expected less than high_freq_factor 1\.0"):
        read(rope_scaling={"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0})


def test_a_part_of_a_head_that_turns_is_refused() -> None:
    assert read(partial_rotary_factor=1.0).head_dim == 32
    for changes in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.25}}):
        with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
            read(**changes)


def test_yarn_extends_the_longest_sequence() -> None:
    """Qwen gives the original length as max_position_embeddings, others the extended one."""
    scaling = {"rope_type": "yarn", "factor": 4.0}
    by_original = read(rope_scaling={**scaling, "original_max_position_embeddings": 2048})
    assert by_original.max_position_embeddings == 8192
    extended = read(
        max_position_embeddings=8192,
        rope_scaling={**scaling, "original_max_position_embeddings": 2048},
    )
    unsaid = read(rope_scaling=scaling)
    assert extended.rope == by_original.rope == unsaid.rope
    assert extended.max_position_embeddings == unsaid.max_position_embeddings == 8192
    # Without a factor it is the ratio of the two.
    ratio = read(
        max_position_embeddings=8192,
        rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 2048},
    )
    assert ratio.rope == extended.rope


# -- sliding windows ---------------------------------------------------------------------------------------


def test_llama_has_no_window() -> None:
    assert read(sliding_window=8).sliding_windows == (None,) * 4


def test_mistrals_null_is_not_absent() -> None:
    mistral = {"architectures": model("Mistral")}
    assert read(**mistral, sliding_window=None).sliding_windows == (None,) * 4
    assert read(**mistral).sliding_windows == (4096,) * 4
    assert read(**mistral, sliding_window=8).sliding_windows == (8,) * 4


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
def test_qwens_window_counts_only_where_it_is_used(name: str) -> None:
    """The same layers as transformers 5.24: those from max_window_layers on slide."""
    qwen = {"architectures": model(name), "sliding_window": 8, "max_window_layers": 2}
    assert read(**qwen).sliding_windows == (None,) * 4
    assert read(**qwen, use_sliding_window=False).sliding_windows == (None,) * 4
    assert read(**qwen, use_sliding_window=True).sliding_windows == (None, None, 8, 8)
    assert read(**{**qwen, "max_window_layers": None}, use_sliding_window=True).sliding_windows == (None,) * 4
    assert read(**{**qwen, "sliding_window": None}, use_sliding_window=True).sliding_windows == (None,) * 4


def test_layer_types_say_which_layers_slide() -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    qwen = {"architectures": model("Qwen3"), "sliding_window": 8, "use_sliding_window": True}
    assert read(**qwen, layer_types=kinds).sliding_windows == (None, 8, None, 8)
    with pytest.raises(CheckpointError, match="layer_types: expected a list of 4 names"):
        read(**qwen, layer_types=kinds[:3])
    with pytest.raises(UnsupportedModelError, match="layer_types: 'linear_attention' is not served"):
        read(**qwen, layer_types=["linear_attention"] * 4)


# -- tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (None, [7, 3], (3, 7)),
        (2, [7, 2], (2, 7)),
        (0, 0, (0,)),
        (None, None, ()),
    ],
)
def test_both_files_know_ends_of_sequence(config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    assert read({"eos_token_id": generation}, eos_token_id=config).eos_token_ids == expected


def test_a_faulty_end_of_sequence_names_its_file() -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: eos_token_id: expected a token id"):
        read(eos_token_id="2")
    with pytest.raises(CheckpointError, match=r"^generation_config\.json: eos_token_id: expected a token id"):
        read({"eos_token_id": [True]})


# -- biases, tying and the rest ----------------------------------------------------------------------------


def test_qwen2s_biases_are_not_in_its_config() -> None:
    assert read(architectures=model("Qwen2")).biased == {"q_proj", "k_proj", "v_proj"}
    assert read(architectures=model("Qwen3")).biased == frozenset()
    assert read().biased == frozenset()
    assert read(attention_bias=True).biased == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert read(mlp_bias=True).biased == {"gate_proj", "up_proj", "down_proj"}


def test_tying_is_read_as_it_stands() -> None:
    assert read(tie_word_embeddings=True).tie_word_embeddings
    assert not read(tie_word_embeddings=False).tie_word_embeddings
    assert read().tie_word_embeddings is None


def test_the_element_type_is_read_of_no_spelling() -> None:
    assert read(dtype="float16") == read(torch_dtype="bfloat16") == read()


def test_another_activation_is_refused() -> None:
    assert read(hidden_act="silu") == read(hidden_act="swish") == read()
    with pytest.raises(UnsupportedModelError, match="hidden_act: 'gelu' is not served"):
        read(hidden_act="gelu")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("architectures", None, "a list of names, found None"),
        ("architectures", [], "a list of names"),
        ("architectures", [3], "a list of names"),
        ("vocab_size", True, "a positive integer, found True"),
        ("vocab_size", 2**31, "a positive integer below 2147483648, found 2147483648"),
        ("vocab_size", "512", "a positive integer"),
        ("num_hidden_layers", 0, "a positive integer"),
        ("rms_norm_eps", 0, "a positive number"),
        ("rms_norm_eps", 10**400, "a positive number that a float can hold"),
        ("rope_theta", 1, "more than 1"),
        ("tie_word_embeddings", "yes", "true or false"),
        ("rope_scaling", [1], "an object"),
        ("use_sliding_window", 1, "true or false"),
    ],
)
def test_an_absurd_field_is_named(field: str, value: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {field}: expected {said}"):
        read(**{"architectures": model("Qwen2"), field: value})


def test_what_is_needed_is_named() -> None:
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        with pytest.raises(CheckpointError, match=rf"{field}: expected a positive integer, found None"):
            read(**{field: None})
        raw = {name: value for name, value in BASE.items() if name != field}
        with pytest.raises(CheckpointError, match=rf"{field}: expected a positive integer, found nothing"):
            read_model_config(raw, {}, source="config.json")
