"""Plans of what the command line names: a model, flags, and a device that is here or is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from engine.config import EngineConfig
from engine.model.headers import CheckpointHeaders
from engine.model.hub_headers import header_directory
from engine.planning.device import choose_planning_device
from engine.planning.levers import find_combination, plan_levers
from engine.planning.plan import LoadPlan, Planner

__all__ = ["open_planner", "plan_load", "with_levers"]


@contextmanager
def open_planner(
    config: EngineConfig,
    *,
    gpu: str | None = None,
    gpu_memory: int | None = None,
    log: logging.Logger | None = None,
) -> Iterator[Planner]:
    """A planner for the model of `config`, a directory or a Hugging Face id.

    Parameters
    ----------
    gpu, gpu_memory
        As `choose_planning_device` takes them.
    log
        Takes what is odd about the checkpoint; None: nobody does.

    Raises
    ------
    ConfigurationError, CheckpointError
        A flag or the checkpoint cannot be used.
    """
    device = choose_planning_device(config, gpu=gpu, gpu_memory=gpu_memory)
    with header_directory(config.model) as directory:
        yield Planner(CheckpointHeaders.open(directory, log=log), device)


def plan_load(
    config: EngineConfig,
    *,
    gpu: str | None = None,
    gpu_memory: int | None = None,
    log: logging.Logger | None = None,
) -> LoadPlan:
    """The load of `config`, with levers if it does not fit. Parameters and errors as `open_planner` has."""
    with open_planner(config, gpu=gpu, gpu_memory=gpu_memory, log=log) as planner:
        return with_levers(planner, config, planner.plan(config))


def with_levers(planner: Planner, config: EngineConfig, plan: LoadPlan) -> LoadPlan:
    """`plan` with the levers that would make it fit; as it is, if it does."""
    if plan.fits:
        return plan
    planner = Planner(CheckpointHeaders.of(planner.headers), planner.device)  # what is odd has been said
    levers = plan_levers(planner, config, plan)
    # More memory is no lever for who has that card.
    alone = any(lever.enough and lever.flag != "--device-memory" for lever in levers)
    combination = None if alone else find_combination(planner, config, plan)
    if combination is None and not alone:
        levers = [lever for lever in levers if lever.enough]
    return msgspec.structs.replace(plan, levers=levers, combination=combination)
