"""The table of ``--alloc-stats`` adds up."""

from __future__ import annotations

from app.cli.statistics import statistics_table
from engine.memory.adaptors import StatisticsMemoryResource
from engine.memory.resources import HostMemoryResource
from engine.memory.scope import memory_scope


def test_rows_are_first_segments_and_add_up() -> None:
    resource = StatisticsMemoryResource(HostMemoryResource(1 << 24))
    with memory_scope("weights/a"):
        weights = [resource.allocate(1 << 20)]
    with memory_scope("weights/b"):
        weights.append(resource.allocate(1 << 20))
    with memory_scope("repack/b"):
        resource.allocate(1 << 22).close()
    table = statistics_table(resource.statistics())
    assert [line.split() for line in table[1:]] == [
        ["weights", "2", "0", "0", "2.0", "MiB", "2.0", "MiB"],
        ["repack", "1", "1", "0", "4.0", "MiB", "0", "B"],
        ["total", "3", "1", "0", "6.0", "MiB", "2.0", "MiB"],
        ["peak:", "6.0", "MiB"],
    ]
    assert len({len(line) for line in table[:-1]}) == 1
    for buffer in weights:
        buffer.close()
