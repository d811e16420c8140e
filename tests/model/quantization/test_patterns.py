"""Patterns that a checkpoint brings along: what they match, and that none of them hangs the load."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CheckpointError
from engine.model.quantization import patterns
from engine.model.quantization.patterns import ModulePatterns

NAMES = [
    "lm_head",
    "model.layers.0.mlp.gate_proj",
    "model.layers.10.self_attn.q_proj",
    "model.layers.3.mlp.experts.17.down_proj",
    "visual.blocks.0.attn.qkv",
]
USED = [
    ".*lm_head",
    "visual.*",
    r"model\.layers\.\d+\.mlp\.gate$",
    r"^model\.layers\.(0|1|10)\..*",
    ".*self_attn.(q|k|v)_proj",
    r"(?!.*experts).*mlp.*",
    r"model\.layers\.\d{1,2}\.mlp\.experts\.\d+\.(gate|up|down)_proj",
    "re",
]


@pytest.mark.parametrize("pattern", USED)
def test_patterns_in_use_match_as_pythons_do(pattern: str) -> None:
    matcher = ModulePatterns([pattern], "config.json: ignore")
    expected = [re.match(pattern, name) is not None for name in NAMES]
    assert [matcher.match(name) for name in NAMES] == expected


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from([*"ab.*+?^$|()", r"\.", r"\d", "(?:a|b)", "a{2}", "[0-9]"]), max_size=8),
    st.text("ab.0", max_size=12),
)
def test_any_pattern_matches_as_pythons_does(parts: list[str], name: str) -> None:
    pattern = "".join(parts)
    try:
        expected = re.match(pattern, name) is not None
    except re.error:
        with pytest.raises(CheckpointError, match=r"^config\.json: ignore: .*no regular expression"):
            ModulePatterns([pattern], "config.json: ignore")
    else:
        assert ModulePatterns([pattern], "config.json: ignore").match(name) == expected


@pytest.mark.parametrize(
    ("pattern", "name"), [("(a|aa)+$", "a" * 80 + "!"), (r"((a|b|ab)*c?)*$", "ab" * 40 + "!")]
)
def test_a_pattern_that_backtracks_for_ever_is_refused(
    pattern: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For Python's own ``re`` each of them takes longer than anybody waits."""
    monkeypatch.setattr(patterns, "_SECONDS", 0.2)
    with pytest.raises(
        CheckpointError, match=r"config\.json: ignore: '.*' takes too long to match a"
    ) as caught:
        ModulePatterns([pattern], "config.json: ignore").match(name)
    assert "\n" not in str(caught.value)


def test_the_time_is_for_all_names_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_SECONDS", 0.2)
    matcher = ModulePatterns(["(a|aa)+$"], "config.json: ignore")
    with pytest.raises(CheckpointError, match="takes too long"):
        matcher.match("a" * 80 + "!")
    with pytest.raises(CheckpointError, match="takes too long"):
        matcher.match("b")


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("((a{1000}){1000}){1000}", "braces for counts only, of 1000 at most"),
        ("a{100000}", "braces for counts only"),
        ("(a{2,}){999}", "braces for counts only"),
        ("a{e<=3}", "braces for counts only"),
        ("a" * 3000, "2000 characters at most"),
        ("(", "no regular expression"),
        ("(?R)", "no regular expression"),
        ("[[a", "no regular expression"),
        ("a**", "no regular expression"),
        ("(?P<x>a)(?P<x>b)", "no regular expression"),
    ],
)
def test_what_is_no_pattern_is_said(pattern: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        ModulePatterns([pattern], "config.json: ignore")
    assert str(caught.value).startswith("config.json: ignore: ")
    assert len(str(caught.value)) < 400
