"""Kill the pipeline wherever it writes, and at random times; then see whether the same command mends it.

    make chaos                     120 faults, spread over all stages and write points
    make chaos ARGS="--faults 20"  fewer, or more

A fault hits a stage of a tiny recipe in a process of its own, forked from one that has imported everything:

    kill        SIGKILL just before a write: a file opened for writing, renamed, removed, synced, linked, a
                folder made, a transaction of MLflow's database committed
    time        SIGKILL at a random time, several times in a row
    term, int   SIGTERM or SIGINT just before a write: exit 143 or 130
    twice       SIGTERM two times: the second one ends the process at once
    full        the write fails because the disk is full: exit 2 with one sentence, or 0 where it was one that
                may fail (a tidying up, the sync of a folder)

Then the same command runs until it is done, and nothing may be lost: what the stage wrote equals, bit for
bit, what it writes without interruption (all but `MEASURED`, which depends on measured times), its manifest
fits, nothing half written is left, and MLflow holds one whole candidate or none, and no run that seems to be
going on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from tests.strikes import ENDINGS, run

STAGES = ("sample", "train", "evaluate", "select", "export")
SMALL = [
    "sample.tokens=300",
    "sample.batch_size=8",
    "train.tokens=400",
    "evaluate={prompts: 2, num_speculative_tokens: [2], max_new_tokens: 6}",
    "data.prompts=[{source: builtin:sql, count: 60}]",
]
SHARES = {"kill": 0.55, "time": 0.15, "term": 0.1, "int": 0.05, "twice": 0.05, "full": 0.1}
"""Of all faults."""
MOST_RUNS = 12  # of one command, until it must be done
MEASURED = {
    "evaluate": ["costs*.json", "transformers-plain.json", "decode-*.json", "certificate.json",
                 "evaluation.json", "report.html", "tables/*", "plots/speedup.*", "plots/batches.*",
                 "plots/positions.*"],
    "select": ["selection.json", "comparison.html"],
    "export": ["hf/README.md", "hf/manifest.json"],
}  # fmt: skip
"""Outputs that no two runs need share: times, what decoders that stop by measured costs did (so the race, the
certificate and the plot of positions), and names and numbers that MLflow gives. All others are compared.
"""
_HEAVY = {
    "sample": ["distill.pipeline", "distill.tracking", "mlflow", "mlflow.store.db.utils", "data.sample",
               "evaluation.decoder.sampler", "pyarrow.parquet", "transformers.models.llama.modeling_llama"],
    "train": ["distill.trainer"],
    "evaluate": ["evaluation.report", "evaluation.plots", "matplotlib.pyplot"],
    "select": ["evaluation.selection"],
    "export": ["distill.export.command", "distill.export.hf"],
}  # fmt: skip


@dataclass
class Reference:
    """What a stage does when nothing disturbs it."""

    before: Path
    """A copy of the runs folder as it was before the stage."""
    payload: dict[str, str]
    """The digests of the files that every run of it writes alike: all but `MEASURED`."""
    writes: int
    seconds: float


@dataclass
class Tally:
    """Faults and losses by kind and stage."""

    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)
    writes: dict[str, int] = field(default_factory=dict)

    def text(self, stages: Sequence[str]) -> str:
        """A table: a row per kind, a column per stage."""
        lines = ["| fault | " + " | ".join(stages) + " | all |", "| --- |" + " --- |" * (len(stages) + 1)]
        for kind in SHARES:
            counts = [self.faults[kind, stage] for stage in stages]
            lines.append(f"| {kind} | {' | '.join(map(str, counts))} | {sum(counts)} |")
        points = ", ".join(f"{stage} {self.writes[stage]}" for stage in stages)
        killed = sum(count for (kind, _), count in self.faults.items() if kind in ("kill", "time", "twice"))
        total = sum(self.faults.values())
        lines += [
            "",
            f"write points: {points}",
            f"{total} faults, {killed} of them kills; {len(self.losses)} losses",
        ]
        return "\n".join([*lines, *self.losses])


class Chaos:
    """A workshop: one runs folder at one path (MLflow keeps absolute ones), restored before each trial."""

    def __init__(self, place: Path, recipe: str, seed: int) -> None:
        self.runs, self.place = place / "runs", place
        self.recipe = recipe
        self.random = random.Random(seed)
        self.references: dict[str, Reference] = {}

    def command(self, stage: str) -> list[str]:
        return [stage, self.recipe, *(word for setting in SMALL for word in ("--set", setting))]

    def learn(self, stage: str) -> Reference:
        """Run the stage twice without faults; what is not measured is the same in both."""
        before = self.place / f"before-{stage}"
        self.runs.mkdir(exist_ok=True)
        shutil.copytree(self.runs, before)
        first = run(self.command(stage), self.runs)
        assert first.status == 0, first.log
        payload = self.payload(stage)
        self.restore(before)
        second = run(self.command(stage), self.runs)
        assert second.status == 0, second.log
        differing = differences(payload, self.payload(stage))
        assert not differing, f"two undisturbed runs of {stage}: {', '.join(differing)}"
        self.references[stage] = Reference(before, payload, second.writes, second.seconds)
        return self.references[stage]

    def restore(self, before: Path) -> None:
        shutil.rmtree(self.runs)
        shutil.copytree(before, self.runs)

    def payload(self, stage: str) -> dict[str, str]:
        return {name: digest for name, digest in self.digests(stage).items() if not is_measured(stage, name)}

    def digests(self, stage: str) -> dict[str, str]:
        (folder,) = self.runs.glob(f"{self.recipe}/{stage}-*[0-9a-f]")
        manifest = json.loads((folder / "manifest.json").read_text())
        return {name: entry["sha256"] for name, entry in manifest["files"].items()}

    def trial(self, kind: str, stage: str, point: int) -> Iterator[str]:
        """One fault before write number `point`, or at random times; yields what went wrong."""
        reference, command = self.references[stage], self.command(stage)
        self.restore(reference.before)
        if kind == "time":
            for _ in range(3):
                ended = run(command, self.runs, after=self.random.uniform(0.05, reference.seconds))
                if ended.status not in ENDINGS[kind]:
                    yield f"ended with {ended.status}: {ended.log[-300:]}"
        else:
            ended = run(command, self.runs, at=point, strike=kind)
            if ended.status not in ENDINGS[kind]:
                yield f"ended with {ended.status}: {ended.log[-300:]}"
        if "Traceback" in ended.log:
            yield f"left a traceback: {ended.log[-300:]}"
        for _ in range(MOST_RUNS):
            again = run(command, self.runs)
            if again.status == 0:
                break
        else:
            yield f"never done: {again.status}, {again.log[-300:]}"
            return
        yield from self.faults(stage)

    def faults(self, stage: str) -> Iterator[str]:
        """What is not as it is after an undisturbed run."""
        from data.files import sha256_file

        (folder,) = self.runs.glob(f"{self.recipe}/{stage}-*[0-9a-f]")
        for name, digest in self.digests(stage).items():
            if not (folder / name).is_file() or sha256_file(folder / name) != digest:
                yield f"{name} is not what its manifest says"
        for name in differences(self.references[stage].payload, self.payload(stage)):
            yield f"{name} differs from an undisturbed run"
        leftovers = [path.name for path in folder.rglob("*.tmp")]
        if leftovers:
            yield f"half written files are left: {', '.join(leftovers)}"
        yield from self.registry_faults(stage)

    def registry_faults(self, stage: str) -> Iterator[str]:
        """Read in a fork, so that this process never opens the database."""
        reading, writing = os.pipe()
        if not (child := os.fork()):
            try:
                os.write(writing, "\n".join(registry_faults(self.runs, stage)).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as stream:
            yield from filter(None, stream.read().split("\n"))
        os.waitpid(child, 0)


def is_measured(stage: str, name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in MEASURED.get(stage, []))


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Files that are not in both, or with different digests."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def registry_faults(runs: Path, stage: str) -> list[str]:
    """What MLflow holds that it should not: phantom candidates, runs that nobody is at."""
    from evaluation.store import open_client, tracking_uri

    client = open_client(tracking_uri(runs))
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = [
        f"run {run.info.run_name} is still RUNNING"
        for run in client.search_runs(experiments, "attributes.status = 'RUNNING'")
    ]
    ready = {
        model.model_id for model in client.search_logged_models(experiments) if str(model.status) == "READY"
    }
    versions = [version.tags.get("model_id") for version in client.search_model_versions()]
    expected = int(stage in ("select", "export"))
    if len(ready) != expected or len(versions) != expected or set(versions) != ready:
        found.append(f"{len(ready)} whole candidates and versions of {versions}, instead of {expected}")
    return found


def plan(
    stages: Sequence[str], writes: dict[str, int], faults: int, rng: random.Random
) -> list[tuple[str, str, int]]:
    """(kind, stage, write point) of each trial: every kind in its share, spread over the stages."""
    planned = []
    total = sum(writes[stage] for stage in stages)
    for kind, share in SHARES.items():
        count = max(1, round(share * faults))
        points = sorted(rng.sample(range(total), min(count, total))) if kind != "kill" else [
            round((number + 0.5) * total / count) for number in range(min(count, total))
        ]  # fmt: skip
        for point in points:
            for stage in stages:
                if point < writes[stage]:
                    planned.append((kind, stage, point))
                    break
                point -= writes[stage]
    return planned


def chaos(place: Path, stages: Sequence[str], faults: int, seed: int, say: Callable[[str], None]) -> Tally:
    """Learn the stages in `place`, an empty folder, then hit them with `faults` faults; the tally."""
    for stage in stages:
        for module in _HEAVY[stage]:
            importlib.import_module(module)
    workshop, tally = Chaos(place, "smoke", seed), Tally()
    for stage in stages:
        reference = workshop.learn(stage)
        tally.writes[stage] = reference.writes
        say(
            f"{stage}: {reference.writes} write points, {reference.seconds:.1f} s, "
            f"{len(reference.payload)} files alike"
        )
    for kind, stage, point in plan(stages, tally.writes, faults, random.Random(seed)):
        wrong = list(workshop.trial(kind, stage, point))
        tally.faults[kind, stage] += 3 if kind == "time" else 1
        tally.losses += [f"{kind} in {stage} at write {point}: {text}" for text in wrong]
        say(f"{kind:5} {stage:8} write {point:4}: {'; '.join(wrong) or 'mended'}")
    return tally


def main() -> int:
    """The command line of `make chaos`."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=120, help="how many (120)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", default=",".join(STAGES), help="which, in order, all before included")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    stages = options.stages.split(",")
    with tempfile.TemporaryDirectory() as place:
        tally = chaos(Path(place).resolve(), stages, options.faults, options.seed, _say)
    sys.stdout.write(tally.text(stages) + "\n")
    return 1 if tally.losses else 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
