"""After a kernel's illegal access: what the backend, the memory resources and the engine say, and what they
ask.

Each act is a process of its own, for its context is lost. Every call of the runtime is counted.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Results
from engine.errors import DeviceLostError, EngineDeadError
from engine.failure_record import read_failure
from engine.llm import LLM
from engine.memory.cuda.device import CudaDeviceAccount, NvmlUsage
from engine.memory.cuda.resources import CudaMallocMemoryResource, CudaPoolMemoryResource
from engine.memory.cuda.runtime import BoundCudaRuntime, CudaCallError
from engine.memory.errors import StickyDeviceError
from engine.memory.settings import TraceSettings
from engine.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
BAD_KERNEL = 'extern "C" __global__ void bad(int* at) { at[0] = 1; }'
ACTS = ("synchronize", "allocate", "pool", "engine")


class CountingRuntime(BoundCudaRuntime):
    """Counts the calls that reach CUDA."""

    calls = 0

    def _call(self, name: str, *arguments: Any) -> Any:
        self.calls += 1
        return super()._call(name, *arguments)

    def clear_last_error(self) -> int:
        self.calls += 1
        return super().clear_last_error()


def launch_bad(device: Any) -> None:
    device.load("bad", BAD_KERNEL)
    device.launch(device.kernel("bad", "bad"), (1,), 1, 0x1000, overlap=False)


def backend_act(act: str) -> dict[str, Any]:
    from engine.backend.cuda.backend import CudaBackend
    from engine.backend.protocol import DType

    runtime = CountingRuntime()
    account = CudaDeviceAccount(runtime, NvmlUsage())
    resource = CudaPoolMemoryResource if act == "pool" else CudaMallocMemoryResource
    memory = resource(account, runtime)
    backend = CudaBackend(memory)
    kept = backend.empty((1 << 20,), DType.UINT8)
    launch_bad(backend.device)
    errors: list[str] = []

    def try_to(call: Callable[[], object]) -> None:
        try:
            call()
        except (DeviceLostError, StickyDeviceError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    # The driver may go on giving memory, and telling what is free, until a call waits.
    requests: list[int] = []
    while act != "synchronize" and len(requests) < 20 and account.health.lost is None:
        try_to(lambda: requests.append(memory.acquire(32 << 20, None)))
        with suppress(CudaCallError):
            memory.read_free()
        time.sleep(0.005)
    found: dict[str, Any] = {"errors": errors, "requests_that_succeeded": len(requests)}
    try_to(backend.synchronize)
    # From here on it is known: nothing more may reach CUDA.
    calls = runtime.calls
    try_to(lambda: memory.acquire(1, None))
    try_to(backend.synchronize)
    kept.buffer.close()
    for ptr in requests:
        memory.release(ptr, 32 << 20, None)
    backend.close()
    found["calls_after"] = runtime.calls - calls
    found["live"] = memory.live
    return found


def engine_act(model: Path) -> dict[str, Any]:
    """A kernel that goes wrong while a step runs."""
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as records:
        llm = LLM(
            model=str(model),
            device="cuda",
            kv_cache_memory=1 << 28,
            max_model_len=512,
            failure_dir=records,
            trace=TraceSettings(trace=True, stats=True),
            output=output,
        )
        runner: Any = llm.engine.core._runner
        forward = runner._model.forward

        def bad_forward(*arguments: Any) -> Any:
            launch_bad(runner._backend.device)
            return forward(*arguments)

        runner._model.forward = bad_forward
        found: dict[str, Any] = {"errors": []}
        try:
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        except EngineDeadError as error:
            cause = error.__cause__
            found["errors"].append(f"{type(cause).__name__}: {cause}")
            found["code"] = getattr(cause, "code", None)
            record = read_failure(next(Path(records).glob("*.json")))
            found["record"] = {
                "what": record.what,
                "fatal": record.fatal,
                "requests": [request.request_id for request in record.requests],
                "free_is_read": None if record.ledger is None else record.ledger["free_is_read"],
                "trace_lines": len(record.trace),
            }
        del runner._model.forward
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            llm.close()
        found["warnings"] = [str(warning.message) for warning in warned]
        found["lines"] = output.getvalue().splitlines()[-5:]
    return found


def judge(act: str, found: dict[str, Any], results: Results) -> None:
    errors = found.get("errors", [])
    if act == "engine":
        results.check(bool(errors) and errors[0].startswith("DeviceLostError"), f"{act}: {errors}")
        record = found.get("record") or {}
        results.check(
            record.get("free_is_read") is False, f"{act}: the ledger does not say that it was not read"
        )
        results.check(not found.get("warnings"), f"{act}: warnings {found.get('warnings')}")
        results.check(not found.get("stderr"), f"{act}: on standard error: {found.get('stderr')}")
        return
    last = [error.partition(":")[0] for error in errors[-3:]]
    results.check(last == ["DeviceLostError", "StickyDeviceError", "DeviceLostError"], f"{act}: {errors}")
    results.check(found.get("calls_after") == 0, f"{act}: {found.get('calls_after')} calls after the loss")
    results.check(found.get("live") == 0, f"{act}: {found.get('live')} bytes are held")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--act", choices=ACTS)
    arguments = parser.parse_args()
    if arguments.act:
        act = arguments.act
        found = engine_act(arguments.model) if act == "engine" else backend_act(act)
        arguments.out.write_text(json.dumps(found))
        return
    results = Results(arguments.out)
    for act in ACTS:
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "act.json"
            command = [sys.executable, "-m", "benchmarks.gpu.lost_context", "--act", act]
            command += ["--model", str(arguments.model), "--out", str(out)]
            child = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
            )
            found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
            found |= {"exit": child.returncode, "stderr": child.stderr[-2000:]}
            results.put(act, found)
            results.check(child.returncode == 0, f"{act}: ended with {child.returncode}")
            judge(act, found, results)
    results.finish()


if __name__ == "__main__":
    main()
