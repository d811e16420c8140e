"""A plan for a person."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from app.cli.plain_text import aligned, printable
from engine.levers import describe_levers
from engine.memory.errors import describe_bytes
from engine.planning.plan import LoadPlan, Peak

__all__ = ["plan_lines", "refusal_lines", "verdict"]

_LAYER = re.compile(r"\.\d+(?=\.)")
_MOST_WIDE = 8


def plan_lines(plan: LoadPlan, lengths: Sequence[int]) -> list[str]:
    """The plan's figures, and at each of `lengths` how many sequences run at once. The verdict comes last."""
    limit = ""
    if plan.limit is not None:
        share = round(plan.limit / plan.capacity, 4)
        limit = f", of which {describe_bytes(plan.limit)} may be used (--gpu-memory-utilization {share:g})"
    return [
        f"{_name(plan)} on {_device(plan)} of {describe_bytes(plan.capacity)}{limit}",
        "",
        *_ledger(plan),
        "",
        *_peaks(plan),
        *_kv_cache(plan, lengths),
        *_wide(plan),
        *(f"estimated: {text}" for text in plan.estimates),
        "",
        *verdict(plan),
    ]


def verdict(plan: LoadPlan) -> list[str]:
    """Whether it fits; if not, the request that would fail, and what would help."""
    if plan.failure is None:
        return [f"fits: {describe_bytes(plan.ledger['free'])} of the device stay free"]
    return ["does not fit:", plan.failure.line, *_help(plan)]


def refusal_lines(plan: LoadPlan) -> list[str]:
    """Why a load is not begun, in the order of a failure's lines."""
    assert plan.failure is not None
    lines = [plan.failure.line, f"engine-fatal: loading {plan.failure.what}"]
    return lines + [f"engine-fatal: {text}" for text in _help(plan)]


def _help(plan: LoadPlan) -> list[str]:
    if plan.combination is not None:
        return [f"{describe_levers(plan.levers)}; together these do: {plan.combination}"]
    if plan.levers:
        return [describe_levers(plan.levers)]
    room = plan.capacity if plan.limit is None else plan.limit
    weights = describe_bytes(plan.needed["weights"])
    return [f"no flag makes it fit: weights take {weights}, and there is room for {describe_bytes(room)}"]


def _name(plan: LoadPlan) -> str:
    return printable(Path(plan.model).name or plan.model)


def _device(plan: LoadPlan) -> str:
    return f"the {plan.description}" if plan.device == "cpu" else f"a GPU ({plan.description})"


def _ledger(plan: LoadPlan) -> list[str]:
    """By tag, with the layers of a kind together: of what is there after the load, or was at the failure."""
    rows: dict[str, list[int]] = {}
    for tag, size in plan.tags.items():
        rows.setdefault(_LAYER.sub(".*", tag), []).append(size)
    table: list[tuple[str, ...]] = [("tag", "blocks", "bytes", "")]
    segments = plan.ledger["segments"]
    for segment, total in segments.items():
        table.append((segment, "", f"{total:,}", describe_bytes(total)))
        for tag, sizes in rows.items():
            if tag.partition("/")[0] == segment:
                amount = sum(sizes)
                name = printable(f"  {tag.partition('/')[2]}")
                table.append((name, f"{len(sizes):,}", f"{amount:,}", describe_bytes(amount)))
    for name in ("rounding", "context", "free"):
        if plan.ledger[name]:
            table.append((name, "", f"{plan.ledger[name]:,}", describe_bytes(plan.ledger[name])))
    lines = aligned(table)
    if plan.fits:
        return lines
    needed = ", ".join(f"{name} {describe_bytes(size)}" for name, size in plan.needed.items())
    return [
        "at the request that fails:",
        *lines,
        f"needed in all: {describe_bytes(plan.resident)} ({needed})",
    ]


def _peaks(plan: LoadPlan) -> list[str]:
    lines = []
    if plan.load_peak is not None:
        over = plan.load_peak.over_resident
        scratch = f"{describe_bytes(over)} of it for the load only" if over > 0 else "all of it stays"
        lines.append(f"peak while weights load: {_peak(plan.load_peak)}; {scratch}")
    if plan.peak is not None:
        lines.append(f"peak: {_peak(plan.peak)}")
    lines.append(f"requests: {plan.requests:,}")
    return lines


def _peak(peak: Peak) -> str:
    return (
        f"{describe_bytes(peak.bytes)} with #{peak.sequence}, {describe_bytes(peak.size)} for "
        f"{printable(peak.tag)} ({peak.site})"
    )


def _kv_cache(plan: LoadPlan, lengths: Sequence[int]) -> list[str]:
    cache = plan.kv_cache
    if cache is None:
        return ["KV cache: it fails before that"]
    at = [f"{cache.sequences_at(length):,} of {length:,}" for length in lengths or [cache.longest_sequence]]
    return [
        f"KV cache: {cache.tokens:,} tokens in {cache.num_blocks:,} blocks of {cache.block_size}, "
        f"{describe_bytes(cache.bytes)} of {cache.dtype}",
        f"longest sequence: {cache.longest_sequence:,} tokens",
        f"sequences at once, by their tokens: {', '.join(at)} (--max-num-seqs {plan.max_num_seqs})",
    ]


def _wide(plan: LoadPlan) -> list[str]:
    wide = plan.wide
    if not wide.tensors:
        return ["not at four bits: nothing but vectors"]
    rows = [
        (f"  {printable(t.name)}", t.format, f"{t.count:,}", describe_bytes(t.bytes),
         f"+{describe_bytes(t.over_four_bits)}")
        for t in wide.tensors[:_MOST_WIDE]
    ]  # fmt: skip
    if len(wide.tensors) > _MOST_WIDE:
        rest = wide.tensors[_MOST_WIDE:]
        sizes = sum(t.bytes for t in rest), sum(t.over_four_bits for t in rest)
        rows.append(("  others", "", f"{sum(t.count for t in rest):,}", describe_bytes(sizes[0]),
                     f"+{describe_bytes(sizes[1])}"))  # fmt: skip
    return [
        f"not at four bits: {describe_bytes(wide.bytes)}, {describe_bytes(wide.over_four_bits)} more than "
        "in NVFP4",
        *aligned(rows, left=2),
    ]
