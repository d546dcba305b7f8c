"""One of several processes that share a stage. `distill.processes` starts them; nobody else needs to.

    python -m distill.worker launch CONFIG STAGE RECIPE RUNS FOLDER    accelerate's launcher
    python -m distill.worker STAGE RECIPE RUNS FOLDER                  what it starts, once per process

What a process reports is a JSON object per line on stdout: progress and, from the first process alone, the
result; a mistake of the user's as "error", from whichever process finds it; and the "signal" that ended it.
When nobody listens any more, the next report fails and the process ends, so no process outlives the command
that it belongs to for long.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from data.errors import UserError
from distill import interrupts

Emit = Callable[[dict[str, Any]], None]


def main(words: Sequence[str]) -> int:
    """Launch the processes, or be one of them; the exit code."""
    if words[0] == "launch":
        launch(words[1], words[2:])
        return 0
    emit = _channel()
    stage, recipe, runs_dir, folder = words[0], *map(Path, words[1:])
    with interrupts.handled():
        try:
            work(stage, recipe, runs_dir, folder, emit)
        except UserError as error:
            emit({"error": str(error)})
            return 2
        except interrupts.Interrupted as interrupted:
            emit({"signal": interrupted.number})
            return interrupted.exit_code
    return 0


def launch(config: str, words: Sequence[str]) -> None:
    """accelerate's launcher of several processes. Its own command starts one alone where there is no GPU."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser, multi_gpu_launcher

    parsed = launch_command_parser().parse_args(
        ["--config_file", config, "--module", "distill.worker", *words]
    )
    multi_gpu_launcher(_validate_launch_command(parsed)[0])


def work(stage: str, recipe: Path, runs_dir: Path, folder: Path, emit: Emit) -> None:
    """This process's part of a stage."""
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())  # also chooses this process's GPU
    first = state.is_main_process
    from distill.context import Run
    from distill.pipeline import _quiet_libraries, train_here
    from distill.recipe import load_recipe
    from distill.sharding import shards_weights

    _quiet_libraries()
    with ExitStack() as stack:
        run = Run(load_recipe(str(recipe)), runs_dir, lambda text: None, stack)
        if shards_weights() and stage == "train" and run.recipe.target.quantization == "none":
            run.device = "cpu"  # where training shards the target onto this process's device
        if stage == "sample":
            _sample(run, folder, state.process_index, state.num_processes, emit)
            result: dict[str, Any] = {}
        else:
            result = train_here(run, folder, partial(_report, emit if first else _silence))
        if first:  # the others may still be at their last shard: the command waits for all
            emit({"result": result})
    state.destroy_process_group()


def _sample(run: Any, folder: Path, share: int, shares: int, emit: Emit) -> None:
    from data.sample import run_share
    from distill.engines import EngineOnDemand, make_engine

    run_share(
        run.prompts,
        EngineOnDemand(partial(make_engine, run, folder)),
        run.recipe.sample,
        held_out=run.held_out,
        seed=run.recipe.seed,
        directory=folder,
        on_tokens=lambda count: emit({"tokens": count}),
        share=share,
        shares=shares,
    )


def _report(emit: Emit, step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
    emit({"step": step, "steps": steps, "tokens": tokens, "measures": measures})


def _channel() -> Emit:
    """The pipe to the command; whatever else is printed goes to stderr."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(message: dict[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")  # one short write: processes share the pipe
        pipe.flush()

    return emit


def _silence(message: dict[str, Any]) -> None:
    """The other processes have nothing to say that the first does not."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
