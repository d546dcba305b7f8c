"""The whole product in one place: sample the target, train a drafter, measure it, pick the best, export it.

    sample -> train -> evaluate -> select -> export

Each stage is a function below that fills one folder; `distill.stages` decides whether it runs, resumes or is
skipped, and `distill.context` holds what they share.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from data.files import canonical_hash, drop_abandoned, write_atomic, write_json
from distill.compatibility import check_compatibility
from distill.context import Run, samples_digest
from distill.identity import environment
from distill.model_files import out_of_memory
from distill.progress import Progress
from distill.recipe import Recipe
from distill.result import Result, read_json
from distill.sampling import sample
from distill.stages import Say, recipe_lock, run_stage
from distill.system_metrics import system_metrics
from evaluation.measures import HEADLINE, candidate_metrics
from evaluation.store import tracking_uri

if TYPE_CHECKING:
    from distill.processes import Processes
    from distill.tracking import Candidate, Tracker
    from distill.train import Report
    from evaluation.selection import Decision

NEEDS = {
    "run": ("sample", "train", "evaluate", "select", "export"),
    "sample": ("sample",),
    "train": ("sample", "train"),
    "evaluate": ("sample", "train", "evaluate"),
    "select": ("sample", "train", "evaluate", "select"),
    "export": ("sample", "train", "evaluate", "select", "export"),
}
"""The stages that each command brings up to date, in order."""


def run(
    recipe: Recipe,
    runs_dir: Path,
    command: str,
    *,
    fresh: bool,
    say: Say,
    processes: "Processes | None" = None,
) -> Result:
    """Bring the stages that `command` needs up to date.

    Args:
        command: one of `NEEDS`: "run" for everything, or the name of the last stage wanted.
        fresh: begin the stage of the command's name again ("run": all of them).
        say: told in sentences what happens.
        processes: those that share sampling and training. They change who works, never what comes out: what
            a recipe's keys are and, up to rounding, what is trained.

    Raises `UserError` where the user has to do something; an interrupt leaves every stage resumable.
    """
    root = runs_dir / recipe.name
    with recipe_lock(root) as killed, ExitStack() as stack:
        write_atomic(root / "recipe.yaml", recipe.resolved_yaml())
        drop_abandoned(runs_dir / "cache")
        started = time.monotonic()
        run = Run(recipe, runs_dir, say, stack, processes, afresh=fresh and command in ("run", "sample"))
        if killed:
            run.end_killed()
        stages = run.stages
        if stages["train"].manifest() is None:
            check_compatibility(recipe, run.target_folder, run.init_folder)
        result = Result(recipe, round(time.monotonic() - started, 3))
        for name in NEEDS[command]:
            notes: list[str] = []

            def work(folder: Path, name: str = name, notes: list[str] = notes) -> None:
                say(f"{name}: {folder}")
                _quiet_libraries()
                uri = tracking_uri(runs_dir)
                with (
                    run.tracker.stage(name) as tracker,
                    system_metrics(name, tracker.run_id, uri),
                    _enough_memory(name),
                ):
                    notes += WORK[name](run, folder, tracker) or []

            outcome = run_stage(stages[name], work, fresh=fresh and command in ("run", name), say=say)
            for note in notes:
                say(f"{name}: {note}")
            outcome.notes += notes
            result.outcomes[name] = outcome
            minutes = f"{outcome.seconds / 60:.1f} minutes"
            say(f"{name}: done before, in {minutes}" if outcome.skipped else f"{name}: done in {minutes}")
        evaluation = result.read("evaluate", "evaluation.json")
        if evaluation and not all(outcome.skipped for outcome in result.outcomes.values()):
            # Beside the settings: runs of recipes compare in MLflow's pages by both.
            measured = candidate_metrics(evaluation)
            run.tracker.log_metrics({name: measured.get(name) for name in HEADLINE})
    return result


# The stages. Each fills `folder`, and goes on where it was interrupted before; sentences that one returns are
# notes for the user.


def train(run: Run, folder: Path, tracker: "Tracker") -> list[str]:
    """A drafter distilled on the samples; the best one on the select split stands in `drafter`."""
    from distill.processes import run_stage_in

    shown: dict[str, float] = {}
    with Progress("train", run.recipe.train.tokens) as progress:

        def report(step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
            progress.to(tokens, ", ".join(f"{name} {value:.3f}" for name, value in measures.items()))
            if measures != shown:  # they stand still between two checks
                shown.update(measures)
                tracker.log_metrics({f"train/{name}": value for name, value in measures.items()}, step)

        if run.processes is None:
            result = train_here(run, folder, report)
        else:
            result = run_stage_in(
                run.processes,
                "train",
                run.recipe,
                run.runs_dir,
                folder,
                lambda message: report(**message),
            )
    write_json(folder / "training.json", result)
    tracker.log_artifact(folder / "training.json")
    counts = {name: result[name] for name in ("clipped_steps", "skipped_steps")}
    tracker.log_metrics({f"train/{name}": value for name, value in counts.items()})
    skipped = counts["skipped_steps"]
    return [f"{skipped} steps without a finite gradient were left out"] if skipped else []


def train_here(run: Run, folder: Path, report: "Report") -> dict[str, Any]:
    """The training itself, in this process or in each of several: what `training.json` says of it."""
    from accelerate import PartialState

    from distill.sharding import shard_target, shards_weights
    from distill.train import train_drafter

    drafter = run.initial_drafter()  # from whole weights
    if shards_weights() and not run.target.quantized:
        shard_target(run.target.model, PartialState().device)
    result = train_drafter(
        drafter,
        run.target,
        run.samples,
        run.recipe.train,
        temperature=run.signal_temperature,
        seed=run.recipe.seed,
        out_dir=folder,
        report=report,
        metric=run.metric,
    )
    return {**dataclasses.asdict(result), "directory": "drafter"}


def evaluate(run: Run, folder: Path, tracker: "Tracker") -> list[str]:
    """The three acceptances before and after training, and the speedup measured in the serving mode."""
    from distill.models import load_drafter
    from evaluation.cost_model import chain_or_tree
    from evaluation.evaluate import run as run_evaluation
    from evaluation.measurements import Evaluation
    from evaluation.plots import write_plots
    from evaluation.report import candidate_page
    from evaluation.tables import draw_tables

    config, draft, test = run.recipe.evaluate, run.recipe.draft, run.samples.where(split="test")
    drafter, before = (
        load_drafter(run.stages["train"].directory / "drafter", run.device),
        run.initial_drafter(),
    )
    plan = Evaluation(
        run.target.model,
        run.target.eos_ids,
        drafter,
        test,
        config,
        run.recipe.serving,
        run.recipe.seed,
        # What is cut out of the target or put on it accepts nothing yet, so its speed is no baseline.
        before=None if draft.kind != "model" or draft.init.cuts else before,
        select=run.samples.where(split="select"),
    )
    with Progress("evaluate", plan.batches(), unit="batches") as progress:
        evaluation = run_evaluation(
            plan,
            before,
            machine=environment(),
            data_digest=samples_digest(test, config),
            directory=folder,
            on_group=lambda: progress.advance(1),
            full_target=run.full_target if run.recipe.target.quantization != "none" else None,
        )
    training = read_json(run.stages["train"].directory / "training.json")
    # What earlier versions trained has no losses
    history = sorted([*training["history"], *training.get("losses", [])], key=lambda entry: entry["step"])
    write_plots(evaluation, history, folder / "plots")
    for heading, table in draw_tables(evaluation).items():
        write_atomic(folder / "tables" / f"{heading.lower().replace(' ', '-')}.csv", table.csv())
    page = candidate_page(evaluation, history, run.recipe.name, run.recipe.resolved_yaml())
    write_atomic(folder / "report.html", page)
    tracker.log_metrics(candidate_metrics(evaluation))
    tracker.log_artifact(folder / "evaluation.json")
    tracker.log_artifact(folder / "report.html")
    tracker.log_artifact(folder / "plots")
    tracker.log_artifact(folder / "tables")
    return [chain_or_tree(evaluation["cost_model"]["best"])]


def select(run: Run, folder: Path, tracker: "Tracker") -> None:
    """Register the drafter with its measures, and make it champion where it measured faster."""
    from evaluation.measures import candidate_params
    from evaluation.registry import read_candidates
    from evaluation.report import comparison_page
    from evaluation.selection import rank

    recipe = run.recipe
    measured = run.stages["evaluate"].directory
    evaluation = read_json(measured / "evaluation.json")
    name = tracker.model_name()
    trained = run.stages["train"].manifest()
    assert trained is not None, "what is selected was trained"
    # Of a training in several sessions the last one's alone are known
    minutes = {} if trained.get("resumed") else {"train/minutes": trained["seconds"] / 60}

    def register() -> "Candidate":
        return tracker.register_candidate(
            run.stages["train"].directory / "drafter",
            {**candidate_metrics(evaluation), **minutes},
            candidate_params(recipe.resolved(), evaluation, recipe.name),
            f"{recipe.name} test prompts",
            evaluation["data_digest"],
            name,
            papers=[measured / "evaluation.json", measured / "certificate.json", measured / "report.html"],
            key=canonical_hash(run.stages["select"].inputs()),
        )

    decision = decide(tracker, name, register)
    write_json(folder / "selection.json", {"name": name, **dataclasses.asdict(decision)})
    ranked = [] if tracker.offline else rank(read_candidates(tracker.client))
    if not tracker.offline:  # nor since
        write_atomic(folder / "comparison.html", comparison_page(ranked))
        tracker.log_artifact(folder / "comparison.html")


def decide(tracker: "Tracker", name: str, register: Callable[[], "Candidate"]) -> "Decision":
    """Is what `register` registers champion of `name`? Where MLflow's server is gone, `sync` decides."""
    from evaluation.selection import Decision
    from evaluation.selection import select as choose

    candidate = register()
    try:
        if not tracker.offline:
            return choose(tracker.client, name, candidate.model_id)
    except Exception:
        if not tracker.offline:
            raise
        register()  # here as well: `sync` finds the one on the server by its key, and decides
    reason = "MLflow's server is gone: `distill sync` sends the candidate and decides."
    return Decision(candidate.model_id, candidate.version, False, reason)


def export(run: Run, folder: Path, tracker: "Tracker") -> None:
    """The drafter in the forms that servers load, with command lines for the best measured K."""
    from distill.export.command import Source, facts_of, prove, write

    recipe = run.recipe
    evaluation = read_json(run.stages["evaluate"].directory / "evaluation.json")
    facts = facts_of(recipe, evaluation, tracker.run_id)
    source = Source(run, run.stages["train"].directory / "drafter", facts)
    for kind in recipe.export.formats:
        write(source, kind, folder / kind, force=True)
    exact = recipe.target.dtype == "float32" and recipe.target.quantization == "none"
    if "hf" in recipe.export.formats and exact:
        # elsewhere near ties make equal texts a matter of luck
        write_json(folder / "verification.json", prove(source, "hf", folder / "hf"))


WORK: dict[str, Callable[[Run, Path, "Tracker"], list[str] | None]] = {
    "sample": sample,
    "train": train,
    "evaluate": evaluate,
    "select": select,
    "export": export,
}


@contextlib.contextmanager
def _enough_memory(stage: str) -> Iterator[None]:
    """Say what to lower where memory ends in a stage."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not out_of_memory(error):
            raise
        lower = {
            "sample": "sample.batch_size or sample.max_new_tokens",
            "train": "train.batch_size, with train.accumulation raised in turn,",
        }
        raise UserError(
            f"{stage}: there is not enough memory ({' '.join(str(error).split())[:200]}): lower "
            f"{lower.get(stage, 'evaluate.batch_sizes or data.max_prompt_tokens')} and run the command again"
        ) from error


def _quiet_libraries() -> None:
    """Silence the libraries' own bars and advice, which would drown ours."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read when datasets is imported
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
