"""Prompts of conversations are transformers' own, and no template takes the process with it.

The expected prompts are what transformers 5.24 (`render_jinja_template`) makes of the same templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError, RequestError
from engine.model import template_sandbox
from engine.model.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": " hé "},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "b"},
]
WITH_CALLS: list[dict[str, Any]] = [
    {"role": "system", "content": " Be <brief> & é.  "},
    {"role": "user", "content": "Hi 😀\n"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "function": {
                    "name": "f",
                    "arguments": {"city": "Köln", "n": 12345678901234567890, "x": [1.5, None, True]},
                }
            }
        ],
    },
    {"role": "stop", "content": "end"},
    {"role": "user", "content": "never"},
]
FUNCTIONS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Gets <x> & 'y' - ü",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

CHATML = """\
{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + eos_token }}
{% endfor %}
{% if add_generation_prompt %}{{ bos_token }}assistant
{% endif %}"""

TOOLS = """{{- bos_token }}
{%- if tools is not none %}
    {%- set ns = namespace(count=0) %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {%- set ns.count = ns.count + 1 %}
        {{- '\\n' ~ ns.count ~ ': ' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '</tools>\\n' }}
    {{- tools | tojson(indent=2) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.content is defined %}
        {{- '[' ~ message.role ~ ']' ~ message.content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.arguments | tojson }}
    {%- endfor %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
{%- endfor %}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
"""

GENERATION = """{% for message in messages %}
    {% if message.role == 'assistant' %}
  {% generation %}
    {{ message.content }}
  {% endgeneration %}
    {%- else %}
{{ loop.index0 }}/{{ loop.length }} {{ loop.last }} {{ message['content'].upper() }} {{ message.content[:2] }}
    {% endif %}
{% endfor %}"""

LANGUAGE = """{% set x %}a{{ 1 }}b{% endset %}\
{% macro m(a, b=2) %}<{{ a }}|{{ b }}>{% endmacro %}{{ x|upper }}{{ m(x) }}{{ m(1, b='é') }}
{{ "%s-%d" % ("s", 3) }} {{ "{:>5}|{}".format("a", x) }} {{ [1, 2] + [3] }} {{ 'ab' * 2 }} {{ 2 ** 10 }} \
{{ messages | map(attribute='role') | join(', ') }} {{ {'a': none, 'b': true, 'c': '<&>é'} | tojson }} \
{{ messages | length }} {{ missing }} {{ none }} {{ [none, 'x'] }} {{ 1.5 }} {{ "a" ~ 1 ~ none ~ [2] }}
{% for a in [[1, [2]], [3]] recursive %}({% if a is iterable %}{{ loop(a) }}{% else %}{{ a }}{% endif %})\
{% endfor %}
{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{{ ',' if not loop.last }}{% endfor %}
{% for n in range(3) if n != 1 %}{{ loop.previtem }}{{ n }}{% else %}none{% endfor %}
{% filter upper %}x{{ x }}{% endfilter %}\
{% macro w() %}[{{ caller() }}]{% endmacro %}{% call w() %}c{% endcall %}"""

TOOLS_PROMPT = """\
<s><tools>
1: {"type": "function", "function": {"name": "f", "description": "Gets <x> & 'y' - ü", \
"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}</tools>
[
  {
    "type": "function",
    "function": {
      "name": "f",
      "description": "Gets <x> & 'y' - ü",
      "parameters": {
        "type": "object",
        "properties": {
          "city": {
            "type": "string"
          }
        }
      }
    }
  }
][user]Hi 😀
{"city": "Köln", "n": 12345678901234567890, "x": [1.5, null, true]}[stop]end"""


def render(template: str, messages: Sequence[Mapping[str, Any]] = CONVERSATION, **options: Any) -> str:
    return ChatTemplate({"default": template}, SPECIAL).render(messages, **options)


@pytest.mark.parametrize(
    ("template", "messages", "options", "expected"),
    [
        (
            CHATML,
            CONVERSATION,
            {},
            "<|im_start|>user\nhé</s>\n<|im_start|>assistant\nok</s>\n<|im_start|>user\nb</s>\n<s>assistant\n",
        ),
        (
            CHATML,
            CONVERSATION,
            {"add_generation_prompt": False},
            "<|im_start|>user\nhé</s>\n<|im_start|>assistant\nok</s>\n<|im_start|>user\nb</s>\n",
        ),
        (TOOLS, WITH_CALLS, {"tools": FUNCTIONS}, TOOLS_PROMPT),
        (
            TOOLS,
            WITH_CALLS,
            {"variables": {"enable_thinking": False}},
            '<s>[user]Hi 😀\n{"city": "Köln", "n": 12345678901234567890, "x": [1.5, null, true]}[stop]end'
            "<think></think>",
        ),
        (GENERATION, CONVERSATION, {}, "0/3 False  HÉ   h\n    ok\n2/3 True B b\n"),
        (
            LANGUAGE,
            CONVERSATION,
            {},
            "A1B<a1b|2><1|é>\ns-3     a|a1b [1, 2, 3] abab 1024 user, assistant, user "
            '{"a": null, "b": true, "c": "<&>é"} 3  None [None, \'x\'] 1.5 a1None[2]\n'
            "((1)((2)))((3))a2,b1002XA1B[c]",
        ),
    ],
)
def test_prompts_are_those_of_transformers(
    template: str, messages: list[dict[str, Any]], options: dict[str, Any], expected: str
) -> None:
    assert render(template, messages, **options) == expected


def test_the_time_is_now() -> None:
    form = "%Y-%m-%d %H"
    before = datetime.now().strftime(form)
    found = render(f"{{{{ strftime_now('{form}') }}}}")
    assert before <= found <= datetime.now().strftime(form)


def test_a_template_can_refuse() -> None:
    with pytest.raises(RequestError, match=r"^messages: .*roles must alternate") as caught:
        render("{{ raise_exception('roles must\nalternate') }}".replace("\n", " "))
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if %}", "no template: line 1"),
        ("{{ " + "(" * 5000, "recursion"),
        ("{% include 'x' %}", "no loader"),
        ("{{ messages[0].nothing.at.all }}", "no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'x' + 1 }}", "can only concatenate str"),
        ("{{ {}['x'].y }}", "has no attribute 'x'"),
        ("{{ raise_exception('a\\nb') }}", r"a\\nb"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set x = messages[0].pop('role') %}", "unsafe"),
        ("{{ lipsum(1000) }}", "undefined"),
    ],
)
def test_every_fault_is_one_line(template: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        render(template)
    assert str(caught.value).startswith("messages: ")
    assert "\n" not in str(caught.value)


DOUBLED = "{{% set ns = namespace(x={0}) %}}{{% for i in range(64) %}}{1}{{% endfor %}}{2}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(100001) %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(64) }}",
        "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{% for a in [9] recursive %}{% if a %}{{ loop([a - 1] * 1000) }}{% endif %}{% endfor %}",
        "{% for a in range(100000) %}{{ messages | sort(attribute='role') }}{% endfor %}",
        "{% for a in range(100000) %}{% set x = (range(100000) | list)[1:] %}{% endfor %}",
        "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
        "{% set x = 'a' * 500000 %}{% set y = 'a' * 500000 %}"
        "{% for a in range(100000) %}{% if x == y %}{% endif %}{% endfor %}",
        "{{ ('a' * 900000) | wordwrap(1) }}",
    ],
)
def test_what_never_ends_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 200_000)
    with pytest.raises(RequestError, match=r"turns of loops and calls|recursion depth|Range too big"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ 10 ** 12 * [1] }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%999999999999d' % 1 }}",
        "{{ '%*d' % (999999999999, 1) }}",
        "{{ '%999999999999d' | format(1) }}",
        "{{ '{:>999999999999}'.format(1) }}",
        "{{ '{x:>999999999999}'.format_map({'x': 1}) }}",
        "{{ 'x'.ljust(999999999999) }}",
        "{{ 'x' | center(999999999999) }}",
        "{{ 'x\n' | indent(999999999999, true) }}",
        "{{ [1] | tojson(indent=999999999999) }}",
        "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
        "{{ ('a' * 10000) | replace('a', 'b' * 10000) }}",
        "{{ (['b' * 10000] * 10000) | join }}",
        "{{ ([''] * 10000) | join('b' * 10000) }}",
        "{{ ('b' * 10000).join([''] * 10000) }}",
        "{{ ([['b' * 10000] * 10000] | string) }}",
        DOUBLED.format("'a'", "{% set ns.x = ns.x ~ ns.x %}", ""),
        DOUBLED.format("'a'", "{% set ns.x = ns.x + ns.x %}", ""),
        DOUBLED.format("'a'", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}", ""),
        DOUBLED.format("'a'", "{% set ns.x = '%s%s' % (ns.x, ns.x) %}", ""),
        DOUBLED.format("'a'", "{% set ns.x = '{0}{0}'.format(ns.x) %}", ""),
        DOUBLED.format("2", "{% set ns.x = ns.x * ns.x %}", ""),
        DOUBLED.format("[1]", "{% set ns.x = [ns.x, ns.x] %}", "{{ ns.x }}"),
        DOUBLED.format("[1]", "{% set ns.x = [ns.x, ns.x] %}", "{{ ns.x | tojson }}"),
        DOUBLED.format("[1]", "{% set ns.x = [ns.x, ns.x] %}", "{{ '%s' % ns.x }}"),
        DOUBLED.format("[1]", "{% set ns.x = [ns.x, ns.x] %}", "{{ '{}'.format(ns.x) }}"),
        DOUBLED.format("[1]", "{% set ns.x = {'a': ns.x, 'b': ns.x} %}", "{{ 'x' ~ ns.x }}"),
    ],
)
def test_what_takes_gigabytes_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 200_000)
    monkeypatch.setattr(template_sandbox, "MAX_OUTPUT", 1 << 20)
    with pytest.raises(RequestError, match=r"more than \d+ |a width of six digits"):
        render(template)


def test_limits_leave_room_for_long_conversations() -> None:
    messages = [{"role": "user", "content": "é" * 1000}, {"role": "assistant", "content": "ok"}] * 2000
    assert len(render(CHATML, messages)) > 2_000_000
    numbers = [{"role": "user", "content": "x", "tool_calls": [{"function": {"arguments": 10**18}}]}]
    assert render(TOOLS, numbers) == "<s>[user]x1000000000000000000"


def test_conversations_are_json() -> None:
    with pytest.raises(RequestError, match=r"expected JSON, found <object object"):
        render("", [{"role": "user", "content": object()}])
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(RequestError, match="64 deep at most"):
        render("", [{"role": "user", "content": deep}])


def test_named_templates(tmp_path: Path) -> None:
    held = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}, "?"]
    template = ChatTemplate.read(tmp_path, {"chat_template": held}, {})
    assert template.render([]) == "d"
    assert template.render([], tools=[]) == "t"
    assert template.render([], name="tool_use") == "t"
    with pytest.raises(RequestError, match=r"'rag'; expected one of default, tool_use"):
        template.render([], name="rag")


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    settings = {"chat_template": "from the settings"}
    assert ChatTemplate.read(tmp_path, settings, {}).render([]) == "from the settings"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("more")
    template = ChatTemplate.read(tmp_path, settings, {})
    assert template.render([]) == "from a file"
    assert template.render([], name="rag") == "more"


def test_a_model_without_a_template(tmp_path: Path) -> None:
    for settings in ({}, {"chat_template": None}, {"chat_template": 3}):
        with pytest.raises(RequestError, match="no chat template"):
            ChatTemplate.read(tmp_path, settings, {}).render([])


@pytest.mark.parametrize(("data", "said"), [(b"\xff{{ x }}", "not UTF-8"), (b" " * (1 << 21), "larger than")])
def test_a_file_that_is_no_template(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"chat_template\.jinja: {said}") as caught:
        ChatTemplate.read(tmp_path, {}, {})
    assert "\n" not in str(caught.value)


def test_tojson_is_what_json_reads() -> None:
    values = {"a": ["<script>", "é", "\u2028", "😀", 1e300, None]}
    found = render("{{ messages[0] | tojson }}", [values])
    assert json.loads(found) == values
    assert "<script>" in found
    assert "é" in found
