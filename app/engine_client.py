"""The engine as the control plane holds it: a process that is watched, and started again when it dies."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO

import anyio
import anyio.to_thread
import msgspec

from app.engine_process import EngineCommand, EngineProcess, describe_exit
from app.failure_store import FailureStore
from app.post_mortem import LastKnown, kernel_kills, post_mortem
from app.request_table import RequestTable
from app.serving_engine import EngineState
from engine.config import EngineConfig, EngineLimits
from engine.errors import EngineDeadError, EngineLostError
from engine.failure import FailureReporter, failure_directory
from engine.memory.settings import TraceSettings
from engine.messages import Abort, AddRequest, EngineFailed, EngineStats, FinishReason, Shutdown, StepOutputs
from engine.model.tokenizer import Tokenizer
from engine.outputs import CompletionDelta
from engine.request import check_request
from engine.wire import (
    EngineReady,
    FailureReport,
    LoadProgress,
    LoadRefused,
    MemoryReport,
    OutOfEngine,
    StartEngine,
)

__all__ = ["ClientSettings", "EngineClient"]

_log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 5.0
"""for an engine that threw to give its memory back and end"""
_EXIT_SECONDS = 1.0
"""for a process whose socket closed to be gone"""
_LONGEST_PAUSE = 10.0
_PAUSE = 0.5
_BUSY_LOOP = "EngineCore busy loop"


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How the engine's process is watched."""

    max_restarts: int = 3
    """how often it may be started again"""
    engine_timeout: float = 300.0
    """seconds without a finished step, while work is waiting, after which it hangs"""
    max_queued: int = 1024
    """sequences that may wait beyond those that run at once"""
    shutdown_patience: float = 5.0
    """seconds for it to end when it is told to"""
    command: EngineCommand = field(default_factory=EngineCommand)


class EngineClient:
    """A `ServingEngine` whose engine runs in a child process, while `running` is entered.

    Parameters
    ----------
    config
        `model` is a directory.
    environ
        The child's environment; also tells where failure records go.
    output
        Takes ``engine-fatal`` lines of engines that could not say them.
    say
        Takes lines for a person: when an engine is ready, and when another is made.
    progress
        Told of each load, tensor by tensor.

    Attributes
    ----------
    failures : FailureStore
    refusal : LoadRefused or None
        Why no engine can be had: a flag or the checkpoint.
    exhausted : anyio.Event
        No engine is there, and none will be.
    generation : int
        How many engines there were; each has a trace of its own.
    """

    def __init__(
        self,
        config: EngineConfig,
        trace: TraceSettings,
        tokenizer: Tokenizer,
        settings: ClientSettings,
        *,
        environ: Mapping[str, str],
        output: TextIO,
        say: Callable[[str], None] = lambda line: None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.failures = FailureStore()
        self.refusal: LoadRefused | None = None
        self.exhausted = anyio.Event()
        self.generation = 0
        self._config = config
        self._trace = trace
        self._settings = settings
        self._environ = environ
        self._say = say
        self._progress = progress
        self._tokenizer = tokenizer
        self._table = RequestTable(tokenizer, max_queued=settings.max_queued)
        self._reporter = FailureReporter(failure_directory(config, environ), config, output=output)
        self._reporter.decode = tokenizer.decode
        self._reporter.on_record = self.failures.add

        self._state = EngineState.STARTING
        self._child: EngineProcess | None = None
        self._limits: EngineLimits | None = None
        self._stats: EngineStats | None = None
        self._ledger: dict[str, Any] | None = None
        self._statistics: dict[str, Any] | None = None
        self._whys_before: Counter[str] = Counter()
        self._failed: EngineFailed | None = None
        self._was_ready = False
        self._progressed = False
        self._stopping = False
        self._ended = anyio.Event()

    # -- what it is like -----------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def limits(self) -> EngineLimits | None:
        return self._limits

    @property
    def stats(self) -> EngineStats | None:
        return self._stats

    @property
    def restarts(self) -> int:
        return max(self.generation - 1, 0)

    @property
    def last_failure_id(self) -> str | None:
        last = self.failures.last
        return None if last is None else last.id

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return None if self._child is None else self._child.pid

    @property
    def tracing(self) -> bool:
        return self._trace.trace

    @property
    def trace_path(self) -> Path | None:
        """The flight recorder's file, of the engine that is or was."""
        return self._trace.file if self._trace.trace else None

    def ledger(self) -> Mapping[str, Any] | None:
        return self._ledger

    def statistics(self) -> Mapping[str, Any] | None:
        """The latest counts known, as `MemoryStatistics.to_dict` has them; None if they are off."""
        return self._statistics

    def alloc_failures(self) -> Mapping[str, int]:
        if self._statistics is None and not self._whys_before:
            return self.failures.counts_by_why()
        return self._whys_before + Counter(_whys(self._statistics))

    # -- requests ------------------------------------------------------------------------------------------

    async def generate(self, request: AddRequest, text: str | None) -> AsyncGenerator[CompletionDelta, None]:
        child, limits = self._child, self._limits
        if self._state is not EngineState.READY or child is None or limits is None:
            raise EngineDeadError(f"the engine is {self._state.value}", failure_id=self.last_failure_id)
        check_request(request, limits)
        in_flight = self._table.open(request, max_num_seqs=limits.max_num_seqs)
        try:
            for core in in_flight.core_requests:
                child.send(core)
            while (delta := await in_flight.get()) is not None:
                yield delta
        finally:
            self._abort(self._table.close(in_flight))

    async def drain(self, seconds: float) -> None:
        """Wait `seconds` for the requests under way to end; end the rest with an error."""
        with anyio.move_on_after(seconds):
            await self._table.wait_empty()
        self._abort(self._table.fail_all("the server is stopping", None, FinishReason.ABORT))

    def _abort(self, core_ids: list[str]) -> None:
        if core_ids and self._child is not None:
            self._child.send(Abort(core_ids))

    # -- the engine's life ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Self, None]:
        """Keeps an engine running inside; no process is left afterwards, and no trace that nobody named."""
        with tempfile.TemporaryDirectory(prefix="vtserve-", ignore_cleanup_errors=True) as directory:
            if self._trace.trace and self._trace.file is None:
                self._trace = replace(self._trace, file=Path(directory, "trace"))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._supervise)
                try:
                    yield self
                finally:
                    with anyio.CancelScope(shield=True):
                        await self._stop(self._settings.shutdown_patience)
                    tasks.cancel_scope.cancel()

    def hurry(self) -> None:
        """End the engine at once when `running` is left, whatever it is doing."""
        self._settings = replace(self._settings, shutdown_patience=0.0)

    async def _stop(self, patience: float) -> None:
        self._stopping = True
        if self._child is not None and self._state is EngineState.READY and patience > 0:
            self._child.send(Shutdown())
            with anyio.move_on_after(patience):
                await self._ended.wait()

    async def _supervise(self) -> None:
        try:
            while not await self._live() and not self._stopping:
                if self.refusal is not None or self.generation > self._settings.max_restarts:
                    self._state = EngineState.DEAD
                    self._table.fail_all("the engine stopped", self.last_failure_id, FinishReason.ERROR)
                    self.exhausted.set()
                    return
                pause = min(_PAUSE * 2 ** (self.generation - 1), _LONGEST_PAUSE)
                turn = f"{self.generation} of {self._settings.max_restarts}"
                self._say(f"the engine is started again in {pause:g} s ({turn})")
                await anyio.sleep(pause)
        finally:
            self._ended.set()

    async def _live(self) -> bool:
        """One engine, from its start to its end. True if it ended because it was told to."""
        self.generation += 1
        self._failed, self._was_ready = None, False
        kills = kernel_kills()
        message = StartEngine(self._config, self._trace, logging.getLogger().getEffectiveLevel())
        command, environ = self._settings.command, self._environ
        try:
            child = await EngineProcess.start(message, command=command, environ=environ)
        except OSError as error:
            await self._record(EngineLostError(f"there is no process for it: {error.strerror}"), pid=0)
            return False
        self._child = child
        stacks: list[str] | None = None
        patience = 0.0
        try:
            async with anyio.create_task_group() as tasks:

                async def watch() -> None:
                    nonlocal stacks
                    await self._watch_for_hang()
                    self._leave()
                    stacks = await child.stacks()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(child.write)
                tasks.start_soon(watch)
                try:
                    async for received in child.messages():
                        self._receive(received, child)
                except msgspec.DecodeError as error:
                    _log.error("the engine sent what is no message: %s", error)
                else:
                    # It hung up by itself, and is about to end.
                    patience = _LAST_WORDS_SECONDS if self._failed or self._stopping else _EXIT_SECONDS
                self._leave()
                tasks.cancel_scope.cancel()
        finally:
            self._child = None
            status = await child.end(patience)
        if self._stopping or self.refusal is not None:
            return self._stopping
        if self._failed is None:
            await self._record_silent_death(child.pid, status, stacks, kills)
        return False

    def _leave(self) -> None:
        """From now on there is no engine."""
        if not self._stopping:
            restarts = self.generation <= self._settings.max_restarts
            self._state = EngineState.RESTARTING if restarts else EngineState.DEAD

    def _receive(self, message: OutOfEngine, child: EngineProcess) -> None:
        self._progressed = True
        match message:
            case StepOutputs(updates, stats):
                self._stats = stats
                self._abort(self._table.process(updates))
            case MemoryReport(ledger, statistics):
                self._ledger, self._statistics = ledger, statistics
            case EngineReady(limits, summary):
                self._say(f"ready: {summary}")
                self._limits, self._state, self._was_ready = limits, EngineState.READY, True
                for core in self._table.to_run():
                    child.send(core)
            case LoadProgress(label, done, total):
                if self._progress is not None:
                    self._progress(label, done, total)
            case FailureReport(record):
                self.failures.add(record)
                self._ledger = record.ledger or self._ledger
                self._statistics = record.statistics or self._statistics
            case LoadRefused():
                self.refusal = message
            case EngineFailed(_, failure_id):
                self._failed = message
                last = self.failures.last
                in_step = last.requests if last is not None and last.id == failure_id else []
                self._died(self._table.of_core_ids(request.request_id for request in in_step), failure_id)

    def _died(self, in_step: Sequence[Any], failure_id: str) -> None:
        self._leave()
        self._stats = None
        self._whys_before += Counter(_whys(self._statistics))
        if self._statistics is not None:
            self._statistics = {**self._statistics, "failures_by_why": {}}
        self._table.engine_died(in_step, failure_id)

    async def _watch_for_hang(self) -> None:
        """Return when the engine has finished no step for too long, while work is waiting."""
        timeout = self._settings.engine_timeout
        tick = min(1.0, timeout / 10)
        waited = 0.0
        while waited < timeout:
            self._progressed = False
            # Ticks are counted, not hours: who was stopped or asleep itself must not blame the engine.
            await anyio.sleep(tick)
            idle = self._state is not EngineState.READY or not self._table.is_busy
            waited = 0.0 if self._progressed or idle else waited + tick

    async def _record_silent_death(
        self, pid: int, status: int, stacks: list[str] | None, kills: int | None
    ) -> None:
        if stacks is not None:
            text = f"no step finished in {self._settings.engine_timeout:g} s (--engine-timeout) while "
            text += f"requests were waiting; the engine process ({pid}) was killed"
        else:
            text = f"the engine process ({pid}) {describe_exit(status)}"
            now = kernel_kills()
            if kills is not None and now is not None and now > kills:
                text += "; the kernel's out-of-memory killer struck since it was started"
        await self._record(EngineLostError(text), pid=pid, stacks=stacks)

    async def _record(self, error: EngineLostError, *, pid: int, stacks: list[str] | None = None) -> None:
        """Compose the record of an engine that said nothing."""
        suspects = []
        if self._was_ready and self._limits is not None:
            by_priority = self._config.scheduling_policy == "priority"
            suspects = self._table.suspects(self._limits.max_num_seqs, by_priority=by_priority)
        known = LastKnown(
            pid=pid,
            doing=_BUSY_LOOP if self._was_ready else f"loading {self._config.model}",
            suspects=suspects,
            stats=self._stats,
            ledger=self._ledger,
            statistics=self._statistics,
            trace_path=self.trace_path,
            stacks=stacks or (),
        )
        verb = None if not self._was_ready else "ended" if stacks is None else "hangs"
        compose = partial(post_mortem, self._reporter, error, known, verb=verb)
        record = await anyio.to_thread.run_sync(compose)
        self._died(suspects, record.id)


def _whys(statistics: Mapping[str, Any] | None) -> Mapping[str, int]:
    return {} if statistics is None else statistics["failures_by_why"]
