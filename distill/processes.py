"""Several processes for one stage: started as a file of recipes/accelerate/ says, heard from over a pipe.

The pipeline itself stays one process: it alone holds the recipe's lock, writes manifests, talks to MLflow and
shows progress. For the stages that several processes share (`distill.worker`) it starts accelerate's launcher
and reads what they report, a JSON object per line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from data.errors import UserError
from distill.interrupts import Interrupted
from distill.recipe import NAME, RECIPES, Recipe

CONFIGS = RECIPES / "accelerate"
_KINDS = {"NO", "MULTI_GPU", "FSDP"}
_STEP_SECONDS = "120"  # the launcher's patience with a process that was told to end
_SHOWN_LINES = 80  # of the processes' own output, where they end without a word; 20 are the launcher's


@dataclass(frozen=True)
class Processes:
    """How many processes, and accelerate's file that says how they work together."""

    config: Path
    count: int


def read_processes(name: str) -> Processes | None:
    """The processes of recipes/accelerate/NAME.yaml, or of the file at a path ending in .yaml; None for one.

    Raises `UserError` where there is no such file, or where it asks for what is not supported or not here.
    """
    known = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONFIGS / f"{name}.yaml"
    if not path.is_file() or (path.parent == CONFIGS and not NAME.fullmatch(path.stem)):
        raise UserError(f"no processes {name!r}: give one of {', '.join(known)}, or the path of a .yaml file")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        count, machines = int(settings["num_processes"]), int(settings.get("num_machines", 1))
        kind = str(settings["distributed_type"])
    except (yaml.YAMLError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{path} is no configuration of accelerate: {error}") from error
    if kind not in _KINDS or machines != 1 or count < 1:
        raise UserError(
            f"{path}: distributed_type must be one of {', '.join(sorted(_KINDS))}, num_machines 1 and "
            f"num_processes 1 or more; they are {kind}, {machines} and {count}"
        )
    if kind == "NO" or count == 1:
        return None
    _check_gpus(path, count)
    return Processes(path.absolute(), count)


def _check_gpus(path: Path, count: int) -> None:
    from distill.identity import gpu

    if gpu() is None:
        return
    import torch

    there = torch.cuda.device_count()
    if 0 < there < count:
        raise UserError(f"{path} asks for {count} processes, a GPU each, and this machine has {there}")


def run_stage_in(
    processes: Processes,
    stage: str,
    recipe: Recipe,
    runs_dir: Path,
    folder: Path,
    hear: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Have `processes` do their parts of a stage in `folder`; what the first of them returns.

    `hear` gets every report. A signal is passed on: each process ends as the work would alone, its training
    step finished and saved; a second one ends this process at once, and then those that find nobody
    listening. Raises `UserError` and `Interrupted` as the work itself would, and `RuntimeError` where a
    process ends without a word.
    """
    result: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory() as scratch:
        # The file's name is the recipe's, and the folders are named by it
        path = Path(scratch) / f"{recipe.name}.yaml"
        path.write_text(recipe.resolved_yaml(), encoding="utf-8")
        words = ["launch", str(processes.config), stage, str(path), str(runs_dir), str(folder)]
        with (Path(scratch) / "output.log").open("w+", encoding="utf-8", errors="replace") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "distill.worker", *words],
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=_environment(processes.count),
                start_new_session=True,  # a terminal's signals reach the processes through us alone
            )
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    message = json.loads(line)
                    if "error" in message:
                        raise UserError(message["error"])
                    if "signal" in message:  # one that came to a process by itself
                        raise Interrupted(message["signal"])
                    if "result" in message:
                        result = message["result"]
                    else:
                        hear(message)
                child.wait()
            except Interrupted as interrupted:
                child.send_signal(interrupted.number)  # the launcher passes it on
                for _ in child.stdout:  # ends when the last process has ended
                    pass
                raise
            finally:
                child.terminate()  # the launcher ends its processes
                child.wait()
            output.seek(0)
            if child.returncode or result is None:
                last = "".join(output.readlines()[-_SHOWN_LINES:])
                raise RuntimeError(f"a process of the stage {stage} ended early:\n{last}")
    return result


def _environment(count: int) -> dict[str, str]:
    """This process's, with the cores shared out and this very tree to import."""
    tree = str(Path(__file__).resolve().parent.parent)
    paths = [tree, *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(max(1, len(os.sched_getaffinity(0)) // count))
    return {
        "OMP_NUM_THREADS": threads,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _STEP_SECONDS,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
    }
