"""Run the smoke recipe over and over, and see whether memory, open files or disk grow.

    make soak              half an hour
    make soak MINUTES=5    less

Every round makes all stages again in one process (`--fresh`), as someone would who leaves it running. Growth
is the slope of a straight line through the rounds behind the warm-up; each limit stands beside its measure
below. Old outputs, which `--fresh` sets aside on purpose, are removed between the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

WARM_UP = 2  # rounds: caches fill, allocators settle
LEAST_ROUNDS = 4
LIMITS = {"memory_mib": 2.0, "open_files": 0.5, "threads": 0.5, "disk_mib": 0.1}
"""Growth a round that still counts as flat. What MLflow keeps of each round, as it is meant to, is no part of
the disk measured.
"""


def measure(runs: Path) -> dict[str, float]:
    """What this process holds now, and what its runs folder takes."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "memory_mib": int(fields["RssAnon"].split()[0]) / 1024,
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(fields["Threads"]),
        "disk_mib": sum(path.stat().st_size for path in runs.rglob("*") if _counts(path)) / (1 << 20),
    }


def _counts(path: Path) -> bool:
    return path.is_file() and not {"mlartifacts", "mlflow.db"} & set(path.parts)


def slopes(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Growth a round of every measure: the least squares line through the rounds."""
    middle = (len(rounds) - 1) / 2
    spread = sum((place - middle) ** 2 for place in range(len(rounds)))
    return {
        name: sum((place - middle) * row[name] for place, row in enumerate(rounds)) / spread
        for name in LIMITS
    }


def grown(rounds: list[dict[str, float]]) -> list[str]:
    """The measures that are not flat, in sentences."""
    return [
        f"{name} grows by {slope:.2f} a round (limit {LIMITS[name]:g})"
        for name, slope in slopes(rounds[WARM_UP:]).items()
        if slope > LIMITS[name]
    ]


def soak(minutes: float, runs: Path, say: Callable[[str], None]) -> list[dict[str, float]]:
    """Rounds until the time is over, at least enough to see a slope."""
    from distill import cli

    rounds: list[dict[str, float]] = []
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end or len(rounds) < WARM_UP + LEAST_ROUNDS:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            code = cli.main(["run", "smoke", "--fresh"])
        assert code == 0, said.getvalue()
        for old in runs.glob("smoke/*.old-*"):
            shutil.rmtree(old)
        rounds.append(measure(runs))
        say(f"round {len(rounds)}: " + ", ".join(f"{name} {value:.1f}" for name, value in rounds[-1].items()))
    return rounds


def main() -> int:
    """The command line of `make soak`."""
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("--minutes", type=float, default=30)
    minutes = parser.parse_args().minutes
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    with tempfile.TemporaryDirectory() as place:
        os.environ["DISTILL_RUNS"] = place
        rounds = soak(minutes, Path(place), lambda text: print_line(sys.stderr, text))
    measured = rounds[WARM_UP:]
    print_line(sys.stdout, f"{len(rounds)} rounds, {len(measured)} measured; growth a round:")
    for name, slope in slopes(measured).items():
        first, last = measured[0][name], measured[-1][name]
        print_line(
            sys.stdout, f"  {name}: {slope:+.3f} (limit {LIMITS[name]:g}), from {first:.1f} to {last:.1f}"
        )
    faults = grown(rounds)
    for fault in faults:
        print_line(sys.stdout, f"FAILED: {fault}")
    return 1 if faults else 0


def print_line(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
