"""`distill promote`: the alias `champion` moves to a candidate where it proves faster than the champion.

Both are measured again, interleaved in one run on this machine, on test prompts of the candidate's own
recipe, which comes from MLflow with the weights: a remote registry alone is enough.
"""

import json
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from data.files import write_json
from distill.progress import Progress
from distill.recipe import Recipe
from distill.stages import Say

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from evaluation.registry import CandidateRow


@dataclass(frozen=True)
class Promotion:
    """What was decided, and on what."""

    name: str
    version: str
    champion_before: str | None
    promoted: bool
    reason: str
    measured: dict[str, Any]
    """Empty where nothing had to be measured."""


def promote(reference: str, runs_dir: Path, say: Say) -> Promotion:
    """Measure candidate `reference` (models:/NAME/VERSION or m-ID) against the champion of its name.

    Raises `UserError` where there is no such finished candidate, or it is champion already.
    """
    from distill.candidates import model_id_of
    from distill.preflight import require_tracking
    from distill.tracking import Tracker
    from evaluation.duel import judge
    from evaluation.registry import CHAMPION, candidates
    from evaluation.selection import NO_CERTIFICATE, newest
    from evaluation.store import open_client, tracking_uri

    require_tracking()
    uri = tracking_uri(runs_dir)
    client = open_client(uri)
    model_id = model_id_of(client, reference)
    rows = candidates(uri)
    own = newest(row for row in rows if row.model_id == model_id and row.name)
    if not own:
        raise UserError(f"{reference} is no finished, registered candidate: `distill compare` lists them.")
    mine = own[0]
    if mine.champion:
        raise UserError(f"{mine.label} is champion already.")
    if not mine.lossless:
        return Promotion(mine.name, mine.version, None, False, NO_CERTIFICATE, {})
    before = client.get_registered_model(mine.name).aliases.get(CHAMPION)
    champion = next((row for row in rows if row.name == mine.name and row.version == str(before)), None)
    recipe = candidate_recipe(client, model_id, mine)
    with ExitStack() as stack:
        tracker = stack.enter_context(
            Tracker.start(recipe.resolved(), recipe.name, recipe.target.name, runs_dir)
        )
        child = stack.enter_context(tracker.stage("promote"))
        contestants = {"challenger": mine.model_id}
        if champion is not None:
            contestants["champion"] = champion.model_id
        measured = measure(recipe, contestants, runs_dir, say)
        promoted, reason = judge(measured, None if champion is None else str(before))
        if promoted and client.get_registered_model(mine.name).aliases.get(CHAMPION) != before:
            promoted, reason = False, "Another promotion moved the champion meanwhile: promote again."
        if promoted:
            client.set_registered_model_alias(mine.name, CHAMPION, mine.version)
        decision = Promotion(
            mine.name, mine.version, None if before is None else str(before), promoted, reason, measured
        )
        _record(child, decision)
    return decision


def measure(recipe: Recipe, contestants: dict[str, str], runs_dir: Path, say: Say) -> dict[str, Any]:
    """The duel of the candidates `contestants` (model ids by name) in the recipe's serving mode."""
    from distill.candidates import resolve_candidate
    from distill.context import Run
    from distill.models import load_drafter
    from evaluation.decoder.engine import Request
    from evaluation.duel import duel

    config = recipe.evaluate
    with ExitStack() as stack:
        run = Run(recipe, runs_dir, say, stack)
        drafters = {
            name: load_drafter(resolve_candidate(model_id, runs_dir), run.device)
            for name, model_id in contestants.items()
        }
        asked = [(prompt, ids) for prompt, ids in run.prompts if prompt.split == "test"]
        seen = [ids for prompt, ids in asked if prompt.seen_template] or [ids for _, ids in asked]
        requests = [Request(ids, config.max_new_tokens, i) for i, ids in enumerate(seen[: config.prompts])]
        batches = -(-len(requests) // recipe.serving.batch_size)
        with Progress("promote", batches, unit="batches") as progress:
            return duel(
                run.target.model,
                run.target.eos_ids,
                drafters,
                requests,
                config.num_speculative_tokens[-1],
                recipe.serving,
                seed=recipe.seed,
                on_group=lambda: progress.advance(1),
            )


def candidate_recipe(client: "MlflowClient", model_id: str, row: "CandidateRow") -> Recipe:
    """The recipe that made a candidate, from the MLflow run that registered it."""
    run = client.get_run(client.get_logged_model(model_id).source_run_id)
    parent = run.data.tags.get("mlflow.parentRunId", run.info.run_id)
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(client.download_artifacts(parent, "recipe.json", scratch))
        return Recipe.model_validate({**json.loads(found.read_text("utf-8")), "name": row.recipe})


def _record(tracker: Any, decision: Promotion) -> None:
    measured = decision.measured
    tracker.log_metrics(
        {
            "promote/moved": float(decision.promoted),
            **{f"promote/difference_{key}": value for key, value in measured["difference"].items()},
            **{
                f"promote/{name}/speedup": measured[name]["speedup"]["mean"]
                for name in ("challenger", "champion")
                if name in measured
            },
        }
    )
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "promotion.json"
        write_json(path, {**vars(decision)})
        tracker.log_artifact(path)
