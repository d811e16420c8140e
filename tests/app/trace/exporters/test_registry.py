"""The formats can be listed and asked for without any package that only one of them needs."""

from __future__ import annotations

import subprocess
import sys
from io import BytesIO

import pytest

from app.trace.exporters import EXPORTERS, Exporter
from engine.errors import ConfigurationError
from engine.memory.record import TraceHeader


def test_names() -> None:
    assert list(EXPORTERS) == ["ndjson", "perfetto", "torch-snapshot", "rmm-csv", "pprof"]


def test_nothing_is_imported_before_it_is_used() -> None:
    heavy = ["numpy", "google.protobuf", "perfetto", "cuda", "msgspec"]
    program = (
        f"import sys; import app.trace.exporters; print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("package", ["no_such_package", "no_such_package.below"])
def test_missing_package_is_told_at_once(package: str) -> None:
    exporter = Exporter("some", "app.trace.ndjson", "text/plain", ".txt", "nobody", ("json", package))
    with pytest.raises(ConfigurationError) as caught:
        exporter.encode([], TraceHeader(capacity=1))
    assert str(caught.value) == f"the format some needs the package {package}: pip install 'vtserve[export]'"


@pytest.mark.parametrize("exporter", EXPORTERS.values(), ids=list(EXPORTERS))
def test_to_a_file_or_in_pieces_it_is_the_same(exporter: Exporter) -> None:
    for package in exporter.packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    out = BytesIO()
    exporter.export([], TraceHeader(capacity=1), out)
    assert out.getvalue() == b"".join(exporter.encode([], TraceHeader(capacity=1)))
    assert out.getvalue()
