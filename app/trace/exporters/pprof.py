"""A profile as google/pprof reads it: a gzipped ``perftools.profiles.Profile``.

A sample is all blocks of one tag from one line of code. Its stack is that line, within the tag, within the
tag's first segment; the tag is a label as well. Values: blocks and bytes allocated, blocks and bytes in use
at the end, and bytes in use when most was.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from engine.memory.errors import TraceFileError
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader

__all__ = ["encode", "profile_class"]

_VALUES = (
    ("alloc_objects", "count"),
    ("alloc_space", "bytes"),
    ("inuse_objects", "count"),
    ("inuse_space", "bytes"),
    ("peak_space", "bytes"),
)
_DEFAULT = "inuse_space"
_MOST = (1 << 63) - 1

_FIELDS: Mapping[str, tuple[tuple[str, int, str], ...]] = {
    "Profile": (
        ("sample_type", 1, "*ValueType"),
        ("sample", 2, "*Sample"),
        ("mapping", 3, "*Mapping"),
        ("location", 4, "*Location"),
        ("function", 5, "*Function"),
        ("string_table", 6, "*string"),
        ("drop_frames", 7, "int64"),
        ("keep_frames", 8, "int64"),
        ("time_nanos", 9, "int64"),
        ("duration_nanos", 10, "int64"),
        ("period_type", 11, "ValueType"),
        ("period", 12, "int64"),
        ("comment", 13, "*int64"),
        ("default_sample_type", 14, "int64"),
    ),
    "ValueType": (("type", 1, "int64"), ("unit", 2, "int64")),
    "Sample": (("location_id", 1, "*uint64"), ("value", 2, "*int64"), ("label", 3, "*Label")),
    "Label": (("key", 1, "int64"), ("str", 2, "int64"), ("num", 3, "int64"), ("num_unit", 4, "int64")),
    "Mapping": (
        ("id", 1, "uint64"),
        ("memory_start", 2, "uint64"),
        ("memory_limit", 3, "uint64"),
        ("file_offset", 4, "uint64"),
        ("filename", 5, "int64"),
        ("build_id", 6, "int64"),
        ("has_functions", 7, "bool"),
        ("has_filenames", 8, "bool"),
        ("has_line_numbers", 9, "bool"),
        ("has_inline_frames", 10, "bool"),
    ),
    "Location": (
        ("id", 1, "uint64"),
        ("mapping_id", 2, "uint64"),
        ("address", 3, "uint64"),
        ("line", 4, "*Line"),
        ("is_folded", 5, "bool"),
    ),
    "Line": (("function_id", 1, "uint64"), ("line", 2, "int64")),
    "Function": (
        ("id", 1, "uint64"),
        ("name", 2, "int64"),
        ("system_name", 3, "int64"),
        ("filename", 4, "int64"),
        ("start_line", 5, "int64"),
    ),
}
"""The schema, google/pprof's proto/profile.proto. ``*`` is repeated; integers that name text are places in
`string_table`."""


@cache
def profile_class() -> Any:
    """The message ``perftools.profiles.Profile``."""
    proto = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "int64": proto.TYPE_INT64,
        "uint64": proto.TYPE_UINT64,
        "bool": proto.TYPE_BOOL,
        "string": proto.TYPE_STRING,
    }
    file = descriptor_pb2.FileDescriptorProto(
        name="vtserve/profile.proto", package="perftools.profiles", syntax="proto3"
    )
    for message_name, fields in _FIELDS.items():
        message = file.message_type.add(name=message_name)
        for name, number, kind in fields:
            kind, repeated = kind.removeprefix("*"), kind.startswith("*")
            described = message.field.add(name=name, number=number)
            described.label = proto.LABEL_REPEATED if repeated else proto.LABEL_OPTIONAL
            if kind in scalars:
                described.type = scalars[kind]
            else:
                described.type = proto.TYPE_MESSAGE
                described.type_name = f".perftools.profiles.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("perftools.profiles.Profile"))


def encode(events: Iterable[TraceEvent], header: TraceHeader) -> Iterator[bytes]:
    """The profile. It is written at the end; what is held meanwhile grows with tags, sites and live blocks.

    Raises
    ------
    TraceFileError
        The sizes add up to more than 64 bits.
    """
    counts = _Counts()
    for event in events:
        counts.add(event)
    yield gzip.compress(_profile(counts, header).SerializeToString(), mtime=0)


_Key = tuple[str, str]
"""tag, site"""


@dataclass(slots=True)
class _Counts:
    """What is known of each tag and site."""

    allocated: dict[_Key, list[int]] = field(default_factory=dict)
    """blocks and bytes"""
    live: dict[int, tuple[_Key, int]] = field(default_factory=dict)
    """by ``#N`` (or the address, for a trace without numbers): key and bytes"""
    now: int = 0
    most: int = 0
    peak: dict[_Key, int] = field(default_factory=dict)
    """bytes when most was live"""
    since: dict[_Key, int] = field(default_factory=dict)
    """what changed since then"""
    first_ns: int = 0
    last_ns: int = 0

    def add(self, event: TraceEvent) -> None:
        self.first_ns = self.first_ns or event.started_ns
        self.last_ns = max(self.last_ns, event.finished_ns)
        if event.state is not EventState.OK or event.kind > EventKind.FREE:
            return
        block = event.sequence or event.pointer
        if event.kind is EventKind.ALLOC:
            key = (event.tag, event.site)
            known = self.allocated.get(key)
            if known is None:
                known = self.allocated[key] = [0, 0]
            known[0] += 1
            known[1] += event.size
            self.live[block] = (key, event.size)
            self._change(key, event.size)
        else:
            found = self.live.pop(block, None)
            if found is not None:
                self._change(found[0], -found[1])

    def _change(self, key: _Key, size: int) -> None:
        self.now += size
        self.since[key] = self.since.get(key, 0) + size
        if self.now > self.most:
            self.most = self.now
            for changed, by in self.since.items():
                self.peak[changed] = self.peak.get(changed, 0) + by
            self.since.clear()

    def in_use(self) -> dict[_Key, list[int]]:
        """Blocks and bytes at the end."""
        held: dict[_Key, list[int]] = {}
        for key, size in self.live.values():
            counts = held.setdefault(key, [0, 0])
            counts[0] += 1
            counts[1] += size
        return held


def _profile(counts: _Counts, header: TraceHeader) -> Any:
    profile = profile_class()()
    strings: dict[str, int] = {"": 0}
    functions: dict[tuple[str, str, int], int] = {}

    def text(value: str) -> int:
        return strings.setdefault(value, len(strings))

    def location(name: str, filename: str, line: int) -> int:
        key = (name, filename, line)
        number = functions.get(key)
        if number is None:
            number = functions[key] = len(functions) + 1
            profile.function.add(
                id=number, name=text(name), system_name=text(name), filename=text(filename), start_line=line
            )
            profile.location.add(id=number, mapping_id=1).line.add(function_id=number, line=line)
        return number

    for name, unit in _VALUES:
        profile.sample_type.add(type=text(name), unit=text(unit))
    profile.default_sample_type = text(_DEFAULT)
    profile.period_type.type, profile.period_type.unit, profile.period = text("space"), text("bytes"), 1
    profile.mapping.add(
        id=1,
        filename=text(f"vtserve memory, {header.device}"),
        has_functions=True,
        has_filenames=True,
        has_line_numbers=True,
    )
    profile.comment.append(text(f"device {header.device}, api {header.api}, {header.total} bytes"))
    profile.time_nanos = header.created_wall_ns
    profile.duration_nanos = min(max(counts.last_ns - counts.first_ns, 0), _MOST)
    held = counts.in_use()
    for (tag, site), allocated in counts.allocated.items():
        values = [*allocated, *held.get((tag, site), (0, 0)), counts.peak.get((tag, site), 0)]
        if max(values) > _MOST:
            raise TraceFileError("the trace is damaged: its sizes add up to more than 64 bits")
        filename, _, line = site.rpartition(":")
        number = int(line) if line.isdecimal() and len(line) < 10 else 0
        sample = profile.sample.add(value=values)
        sample.location_id.append(location(site or "?", filename if number else site, number))
        sample.location_id.append(location(tag, "", 0))
        if "/" in tag:
            sample.location_id.append(location(tag.partition("/")[0], "", 0))
        sample.label.add(key=text("tag"), str=text(tag))
    profile.string_table.extend(strings)
    return profile
