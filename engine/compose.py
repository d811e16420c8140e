"""The composition root: the one place where an engine's parts are made and handed to each other."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TextIO

from cuda.core import MemoryResource

from engine.backend.protocol import DType
from engine.block_pool import BlockPool
from engine.config import EngineConfig, EngineLimits
from engine.core import EngineCore
from engine.devices import choose_device
from engine.errors import CheckpointError, ConfigurationError
from engine.failure import FailureReporter, failure_directory, summarize_error
from engine.failure_record import FailureRecord
from engine.kv_cache import KVCacheManager
from engine.kv_sizing import KVPlan
from engine.memory.errors import TraceFileError
from engine.memory.house import MemoryHouse
from engine.memory.settings import TraceSettings
from engine.model.checkpoint import Checkpoint, resolve_model
from engine.model.config import ModelConfig
from engine.model.loader import Progress
from engine.model.tokenizer import Tokenizer
from engine.planning.after_load import (
    TagDifference,
    compare_with_plan,
    difference_lines,
    levers_after,
)
from engine.residency import Residency
from engine.runner import ModelRunner
from engine.scheduler import Scheduler

__all__ = ["Engine", "Progress", "build_engine"]

_log = logging.getLogger(__name__)

_USERS_ERRORS = (ConfigurationError, CheckpointError, TraceFileError)
"""What is wrong with a flag or a file is said in its one line; it takes no failure record."""


@dataclass(slots=True, eq=False)
class Engine:
    """An engine that is ready, and what stands around its core."""

    config: EngineConfig
    limits: EngineLimits
    model_config: ModelConfig
    tokenizer: Tokenizer
    house: MemoryHouse
    core: EngineCore
    kv_plan: KVPlan
    kv_bytes: int
    kv_dtype: DType
    differences: list[TagDifference]
    """between the load and its plan, by tag; empty where nobody counts tags"""
    _parts: ExitStack

    def close(self) -> None:
        """Give back all memory. Idempotent."""
        self._parts.close()


def build_engine(
    config: EngineConfig,
    *,
    trace: TraceSettings,
    output: TextIO,
    environ: Mapping[str, str],
    memory: MemoryResource | None = None,
    progress: Progress | None = None,
    on_failure: Callable[[FailureRecord], None] | None = None,
) -> Engine:
    """Load the model of `config` and make everything around it.

    Parameters
    ----------
    trace
        What the memory house watches.
    output
        Takes trace lines and ``engine-fatal``.
    environ
        Tells where failure records and compiled kernels go.
    memory
        The device's memory; None: the device's own resource.
    progress
        Told of the load, tensor by tensor.
    on_failure
        Told of each failure record.

    Raises
    ------
    ConfigurationError, CheckpointError, TraceFileError
        A flag, variable or file cannot be used.
    EngineDeadError
        Anything else went wrong: ``__cause__`` says what, and a failure record tells more. All memory was
        given back.
    """
    failures = FailureReporter(failure_directory(config, environ), config, output=output)
    if on_failure is not None:
        failures.on_record = on_failure
    parts = ExitStack()
    try:
        return _build(config, parts, failures, trace, output, environ, memory, progress)
    except Exception as error:
        is_users = isinstance(error, _USERS_ERRORS)
        record = None if is_users else failures.report(error, doing=f"loading {config.model}", fatal=True)
        _close_after(error, parts)
        if record is None:
            raise
        raise failures.dead(record) from error
    except BaseException as error:
        _close_after(error, parts)
        raise


def _build(
    config: EngineConfig,
    parts: ExitStack,
    failures: FailureReporter,
    trace: TraceSettings,
    output: TextIO,
    environ: Mapping[str, str],
    memory: MemoryResource | None,
    progress: Progress | None,
) -> Engine:
    device = choose_device(config, environ)
    checkpoint = Checkpoint.open(resolve_model(config.model))
    tokenizer = Tokenizer.open(checkpoint.path)
    failures.decode = tokenizer.decode
    residency = Residency(
        config, device, checkpoint, trace=trace, memory=memory, output=output, progress=progress
    )
    parts.callback(residency.close)
    failures.house = house = residency.open_house()
    failures.levers = partial(levers_after, residency)
    resident = residency.fill()
    limits, plan, cache = residency.limits, resident.kv_plan, resident.kv_cache
    _log.info("%s", plan.describe(cache.nbytes, residency.kv_dtype.label))
    differences = _compare(residency, house)
    manager = KVCacheManager(
        BlockPool(plan.num_blocks), limits.block_size, prefix_caching=config.enable_prefix_caching
    )
    core = EngineCore(
        limits,
        Scheduler(limits, manager, config.scheduling_policy),
        ModelRunner(resident.model, resident.backend, cache.layers, limits),
        eos_token_ids=checkpoint.config.eos_token_ids,
        failures=failures,
        seed=config.seed,
    )
    parts.callback(core.close)
    return Engine(
        config=config,
        limits=limits,
        model_config=checkpoint.config,
        tokenizer=tokenizer,
        house=house,
        core=core,
        kv_plan=plan,
        kv_bytes=cache.nbytes,
        kv_dtype=residency.kv_dtype,
        differences=differences,
        _parts=parts,
    )


def _compare(residency: Residency, house: MemoryHouse) -> list[TagDifference]:
    """Hold the load against its plan, where somebody wants to know."""
    if house.statistics is None and not _log.isEnabledFor(logging.INFO):
        return []
    try:
        differences = compare_with_plan(residency, house)
    except Exception as error:
        # The engine is loaded and well: a plan that goes wrong is not to stop it.
        _log.warning("the load could not be planned: %s", summarize_error(error))
        return []
    for line in difference_lines(differences):
        _log.info("%s", line)
    return differences


def _close_after(error: BaseException, parts: ExitStack) -> None:
    """Give back all memory: what `parts` hold, and what the frames that `error` went through still name."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    parts.close()
