"""Other programs' formats. `EXPORTERS` has them by name; nothing is imported before it is used.

Every format is a generator ``encode(events, header) -> Iterator[bytes]`` that takes events as they come and
gives pieces of the file as it goes, so that a trace of any length passes in bounded memory: to a file
(`Exporter.export`), or into a response.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, BinaryIO

from engine.errors import ConfigurationError

if TYPE_CHECKING:
    from engine.memory.record import TraceEvent, TraceHeader

__all__ = ["EXPORTERS", "Exporter"]


@dataclass(frozen=True, slots=True)
class Exporter:
    """A format."""

    name: str
    module: str
    """where its ``encode`` is"""
    media_type: str
    suffix: str
    """what files of it end in"""
    reader: str
    """what opens it"""
    packages: tuple[str, ...] = ()
    """import packages that it needs beyond vtserve's own"""

    def encode(self, events: Iterable[TraceEvent], header: TraceHeader) -> Iterator[bytes]:
        """The trace in this format, in pieces.

        Raises
        ------
        ConfigurationError
            Here, before the first piece: a package is missing. One line that says how to get it.
        """
        for package in self.packages:
            if not _is_there(package):
                raise ConfigurationError(
                    f"the format {self.name} needs the package {package}: pip install 'vtserve[export]'"
                )
        pieces: Iterator[bytes] = import_module(self.module).encode(events, header)
        return pieces

    def export(self, events: Iterable[TraceEvent], header: TraceHeader, out: BinaryIO) -> None:
        """Write the trace in this format to `out`. Raises like `encode`, and what `out` raises."""
        for piece in self.encode(events, header):
            out.write(piece)


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package above it is missing
        return False


EXPORTERS: Mapping[str, Exporter] = {
    exporter.name: exporter
    for exporter in (
        Exporter("ndjson", "app.trace.ndjson", "application/x-ndjson", ".ndjson", "vtserve trace, jq"),
        Exporter(
            "perfetto",
            "app.trace.exporters.perfetto",
            "application/octet-stream",
            ".pftrace",
            "ui.perfetto.dev, Perfetto's trace processor",
            ("google.protobuf", "perfetto"),
        ),
        Exporter(
            "torch-snapshot",
            "app.trace.exporters.torch_snapshot",
            "application/octet-stream",
            ".pickle",
            "pytorch.org/memory_viz, torch/cuda/_memory_viz.py",
        ),
        Exporter(
            "rmm-csv",
            "app.trace.exporters.rmm_csv",
            "text/csv; charset=utf-8",
            ".csv",
            "RMM's replay benchmark",
        ),
        Exporter(
            "pprof",
            "app.trace.exporters.pprof",
            "application/octet-stream",
            ".pb.gz",
            "pprof, speedscope",
            ("google.protobuf",),
        ),
    )
}
