"""Writes a trace until it is killed, as an engine does: ``PATH CAPACITY``. Commands come on standard input.

``N`` makes N allocations, ``free`` frees the oldest, ``fail`` asks for too much, ``new`` begins a new trace.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.memory.errors import OutOfMemoryError
from engine.memory.house import MemoryHouse
from engine.memory.resources import HostMemoryResource
from engine.memory.scope import memory_scope
from engine.memory.settings import TraceSettings


def make_house(path: Path, capacity: int) -> MemoryHouse:
    settings = TraceSettings(trace=True, file=path, records=capacity, min_bytes=1 << 40, low_free_bytes=0)
    return MemoryHouse.build(HostMemoryResource(1 << 30), settings)


def main(path: Path, capacity: int) -> None:
    house = make_house(path, capacity)
    buffers = []
    count = 0
    print("ready", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["free"]:
                buffers.pop(0).close()
            case ["fail"]:
                try:
                    with memory_scope("kv/model.layers.0.k"):
                        house.resource.allocate(1 << 40)
                except OutOfMemoryError:
                    pass
            case ["new"]:
                house.close()
                house = make_house(path, capacity)
                buffers.clear()
            case [number]:
                for _ in range(int(number)):
                    count += 1
                    with memory_scope(f"weights/model.layers.{count}.mlp"):
                        buffers.append(house.resource.allocate(1024 * count))
        print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
