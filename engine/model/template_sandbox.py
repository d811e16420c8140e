"""An environment for templates that we did not write: they cannot reach the interpreter, run on for ever or
grow without bound.

jinja2's sandbox keeps a template from Python's internals, and ``range`` from more than 100,000 numbers.
Looked at here is what it lets pass: how many turns loops take and how many calls there are (so macros and
recursive loops end that call themselves), how much is printed, and how large a value is before an operator,
a filter or a method makes text of it or repeats it, or something is compared with it (``in``, ``==``).

Not covered: a template may hold as many values of the largest size as its own text has room for.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["MAX_OUTPUT", "MAX_STEPS", "LimitedEnvironment", "TemplateLimitError"]

MAX_OUTPUT = 16 << 20
"""characters of a prompt, and characters and elements of any value on the way"""
MAX_STEPS = 4_000_000
"""turns of loops, calls, elements of values that are walked through, and 256 characters that are read"""
_CALL = 16
"""turns of a loop that take as long as a call"""
_COPIED = 32_768
"""characters that are copied while a loop turns"""
MAX_BITS = 4096
"""of an integer"""

_WIDE = re.compile(r"\*|\d{6}")
"""what makes a format print a lot"""

_STRUCTURAL = frozenset(
    {
        *("abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby", "int"),
        *("items", "last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr"),
        *("reverse", "round", "select", "selectattr", "slice", "sort", "unique"),
    }
)
"""filters that pass elements on as they are; all others may make text of what they are given"""

_CONSTANT = frozenset({"attr", "count", "d", "default", "first", "last", "length"})
"""structural filters that do not walk through what they are given"""

_SIZED = (str, bytes, list, tuple, dict, set, frozenset, range)


class TemplateLimitError(TemplateError):
    """A template does more than a prompt needs."""


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what the assistant said, for training. A prompt just
    has it.
    """

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """What transformers gives to chat templates, within limits. It renders once, as it counts.

    What is over a limit is a TemplateLimitError. Templates raise about any other exception, too.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are computed when they are used, within the limits
            finalize=self._printed,
            extensions=[_Generation, loopcontrols],
        )
        self._steps = 0
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.globals.pop("lipsum", None)
        self.filters["tojson"] = _to_json
        for name, function in self.filters.items():
            self.filters[name] = self._limited(name, function)
        self.filters["_counted"] = self._counted
        self.filters["_compared"] = self._printed

    def render(self, code: CodeType, variables: Mapping[str, Any]) -> str:
        """What a template prints, which any environment of this class compiled."""
        template = self.template_class.from_code(self, code, self.make_globals(None))
        pieces, length = [], 0
        for piece in template.generate(variables):
            length += len(piece)
            _check_size(length)
            pieces.append(piece)
        return "".join(pieces)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._step(_CALL)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(__obj, LoopContext) and args:
            args = (__self._counted(args[0]), *args[1:])
        elif isinstance(owner, str | bytes | int):
            arguments = (*args, *kwargs.values())
            __self._measure([owner, *arguments])
            name = method.__name__
            if name in ("format", "format_map"):
                _check_format(owner)
            else:
                _check_numbers(arguments)
            if name == "join" and args:
                _check_size(_size(owner) * _size(args[0]))
            elif name == "replace" and len(args) > 1:
                _check_replaced(owner, *args[:2])
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            _check_format(left)
            self._measure(right)
        elif operator == "+":
            _check_size(_size(left) + _size(right))
        elif operator == "**":
            _check_bits(_bits(left) * abs(right) if isinstance(right, int) else 0)
        else:
            _check_bits(_bits(left) + _bits(right))
            for sequence, count in ((left, right), (right, left)):
                if isinstance(count, int):
                    _check_size(_size(sequence) * count)
        return _checked(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, slice):
            self._step(_size(obj) // 256)
        return super().getitem(obj, argument)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The template with what has no other way in: loops, comparisons, assigned blocks, and ``~``."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, "_counted")
        for comparison in template.find_all(nodes.Compare):
            comparison.expr = _filtered(comparison.expr, "_compared")
            for operand in comparison.ops:
                operand.expr = _filtered(operand.expr, "_compared")
        for block in template.find_all(nodes.AssignBlock):
            block.filter = _filtered(block.filter, "string")
        for parent in [template, *template.find_all(nodes.Node)]:
            for field, value in parent.iter_fields():
                if isinstance(value, list):
                    value[:] = map(_without_concatenation, value)
                else:
                    setattr(parent, field, _without_concatenation(value))
        return template

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter `function`. Its attributes stay: they tell jinja2 what to hand in."""

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self._step(_CALL)
            if name not in _STRUCTURAL:
                for value in (*args, *kwargs.values()):
                    self._measure(value)
            elif name not in _CONSTANT:
                self._step(max(map(_size, args)))
            if name == "wordwrap":  # copies what is left of a long word at each line
                self._step(len(str(args[1])) ** 2 // _COPIED)
            if name == "format":
                _check_format(args[0])
            elif name not in ("d", "default"):
                _check_numbers((*args[1:], *kwargs.values()))
            if name == "join":
                separator = args[2] if len(args) > 2 else kwargs.get("d", "")
                _check_size(_size(separator) * _size(args[1]))
            elif name == "replace" and len(args) > 3:
                _check_replaced(*map(str, args[1:4]))
            return _checked(function(*args, **kwargs))

        return limited

    def _printed(self, value: Any) -> Any:
        self._measure(value)
        return value

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._step()
            yield value

    def _step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > MAX_STEPS:
            raise TemplateLimitError(f"more than {MAX_STEPS} turns of loops and calls")

    def _measure(self, value: Any) -> None:
        """Check the text that becomes of `value`: what it holds twice is there twice."""
        size, waiting = 0, [value]
        while waiting:
            value = waiting.pop()
            size += _size(value)
            _check_size(size)
            self._step(_size(value) if not isinstance(value, str | bytes) else len(value) // 256)
            if isinstance(value, dict):
                waiting += [*value.keys(), *value.values()]
            elif isinstance(value, list | tuple | set | frozenset):
                waiting += value


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: jinja2's own escapes what HTML would take for markup."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=getattr(node, "lineno", 1))


def _without_concatenation(node: Any) -> Any:
    """``a ~ b`` as ``[a, b] | join``."""
    if not isinstance(node, nodes.Concat):
        return node
    return _filtered(nodes.List(node.nodes, lineno=node.lineno), "join")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, _SIZED) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT:
        raise TemplateLimitError(f"more than {MAX_OUTPUT} characters or elements")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimitError(f"a number of more than {MAX_BITS} bits")


def _check_numbers(values: Iterable[Any]) -> None:
    """Numbers that a method or a filter may take as a width or a count."""
    for value in values:
        if isinstance(value, int):
            _check_size(abs(value))


def _check_format(value: Any) -> None:
    if isinstance(value, str) and _WIDE.search(value):
        raise TemplateLimitError("a format with a width of six digits or more, or a variable one")


def _check_replaced(text: Any, old: Any, new: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        _check_size(text.count(old) * len(new))


def _checked(value: Any) -> Any:
    _check_size(_size(value))
    _check_bits(_bits(value))
    return value
