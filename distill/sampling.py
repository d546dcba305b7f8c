"""The sampling stage of a recipe: its engine over its prompts, in this process or in several, then what came
of it, in figures and as a page.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.files import write_atomic, write_json
from data.sample import PAGE, SUMMARY, drop_damaged_shards, kept_tokens, plan
from data.sample import run as run_sampling
from data.sample_summary import budget_notes, sample_metrics, sample_notes
from data.take_over import take_over
from distill.context import Run
from distill.engines import EngineOnDemand, can_share, make_engine
from distill.processes import run_stage_in
from distill.progress import Progress
from distill.result import read_json

if TYPE_CHECKING:
    from distill.tracking import Tracker


def sample(run: Run, folder: Path, tracker: Tracker) -> list[str]:
    """The target's own answers as token ids, with the hidden states that chose each token."""
    config = run.recipe.sample
    shared = run.processes is not None and can_share(config)
    run.say(f"sample: {run.held_out} held-out prompts a kind first, then {config.tokens:,} training tokens")
    if not run.afresh:
        _take_over(run, folder)
    with Progress("sample", config.tokens) as progress:
        if shared:
            assert run.processes is not None
            drop_damaged_shards(folder)
            progress.advance(kept_tokens(folder))
            run_stage_in(
                run.processes,
                "sample",
                run.recipe,
                run.runs_dir,
                folder,
                lambda message: progress.advance(message["tokens"]),
            )
        # After several processes all shards are there: they are counted, and what was sampled ahead goes
        engine = EngineOnDemand(partial(make_engine, run, folder))
        tokens = run_sampling(
            run.prompts,
            engine,
            config,
            held_out=run.held_out,
            seed=run.recipe.seed,
            directory=folder,
            on_tokens=(lambda count: None) if shared else progress.advance,
        )
    summary = _describe_samples(run, folder)
    tracker.log_metrics({"sample/tokens": tokens, **sample_metrics(summary)})
    tracker.log_artifact(folder / SUMMARY)
    tracker.log_artifact(folder / PAGE)
    gains = getattr(engine.made, "gains", [])  # of a drafter, where one was used in this session
    for gain in gains:
        tracker.log_metrics({f"sample/speedup_t{gain.temperature:g}": gain.speedup})
    short = budget_notes(tokens, config.tokens)
    return [*sample_notes(summary), *short, *(gain.note() for gain in gains)]


def _take_over(run: Run, folder: Path) -> None:
    """Link what finished samplings of any recipe here hold of this one's shards: they differ in their budget
    and in how many prompts they hold out at most.
    """
    elsewhere = run.stages["sample"].siblings(
        besides=[("config", "sample", "tokens"), ("config", "held_out")]
    )
    if not elsewhere:
        return
    shards = plan(run.prompts, run.recipe.sample, held_out=run.held_out, seed=run.recipe.seed)
    drop_damaged_shards(folder)
    if taken := take_over(shards, elsewhere, folder):
        run.say(f"sample: shards taken over from finished samplings here: {taken}")


def _describe_samples(run: Run, folder: Path) -> dict[str, Any]:
    """Add to the summary how open the target's choices were, where its hidden states tell, and write the page
    about the samples; the summary.
    """
    from data.records import open_samples
    from evaluation.head import head_of
    from evaluation.sample_page import entropy_summary, sample_page

    samples, summary = open_samples(folder), read_json(folder / SUMMARY)
    if samples.has_signals:
        head = head_of(run.target.model).detached()
        summary["entropy"] = entropy_summary(samples, head, run.signal_temperature)
        write_json(folder / SUMMARY, summary)
    write_atomic(folder / PAGE, sample_page(samples, summary, run.recipe.name, run.tokenizer))
    return summary
