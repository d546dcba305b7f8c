"""`distill bench alignment`: losses, drafter shapes and choices of data against each other, on equal budgets.

All arms share a recipe's samples, start, tokens, learning rate, batches and seed, and differ in the settings
below alone. Each is measured after its last step on the test split, teacher-forced: the three acceptances,
and tokens per target call of chains of 4 and 8 drafts. An arm's result is a file of its own, so a bench that
was stopped goes on where it was, inside an arm too. Where a race is asked for the arms' drafters are kept
beside their results, and decode the first test prompts in turns with plain decoding.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from data.files import canonical_hash, write_json
from distill.bench.race import contestant, race_drafters, race_requests
from distill.context import Run
from distill.identity import environment
from distill.recipe import load_recipe
from distill.result import read_json
from distill.stages import Say, recipe_lock

if TYPE_CHECKING:
    from data.records import Samples
    from evaluation.acceptance import AcceptanceTable
    from evaluation.decoder.drafters import DraftModel
    from evaluation.decoder.engine import Request

TOKENS = 50_000
COUNTS = (4, 8)
BASELINE = "forward_kl"
UNTRAINED = ("start", "ngram")

_PRUNED = "draft.init.layers=null"
ARMS: dict[str, tuple[str, ...]] = {
    "start": (),  # not trained
    "ngram": (),  # prompt look-up, not trained either: the control
    BASELINE: ("train.loss.name=forward_kl",),
    "cross_entropy": ("train.loss.name=cross_entropy",),
    "reverse_kl": ("train.loss.name=reverse_kl",),
    "jsd": ("train.loss.name=jsd",),
    "tvd": ("train.loss.name=tvd",),
    "tvd_pp": ("train.loss.name=tvd_pp",),
    "neg_log_acceptance": ("train.loss.name=neg_log_acceptance",),
    "lk_hybrid": ("train.loss.name=lk_hybrid",),
    "argmax": ("train.loss.name=argmax",),
    "kl_then_hybrid": ("train.loss.name=lk_hybrid", "train.loss.warm_start={share: 0.5}"),
    "kl_then_tvd": ("train.loss.name=tvd", "train.loss.warm_start={share: 0.5}"),
    "layers_2": (_PRUNED, "draft.init.layer_count=2"),
    "layers_4": (_PRUNED, "draft.init.layer_count=4"),
    "layers_6": (_PRUNED, "draft.init.layer_count=6"),
    "even_4": (_PRUNED, "draft.init.layer_count=4", "draft.init.choose_by=even"),
    "chosen_tokens": ("train.learnable_share=0.4",),
    "flat_samples": ("train.flat_share=0.5",),
    "on_policy": ("train.on_policy={share: 0.25}",),
    "full_vocabulary": ("draft.vocab_size=null",),
    "gkd": ("draft.vocab_size=null",),  # trl's trainer; to be compared with full_vocabulary
}
"""What sets each arm apart from the recipe, as `--set` would say it."""


def bench(
    name: str,
    sets: Sequence[str],
    tokens: int,
    arms: Sequence[str],
    runs_dir: Path,
    say: Say,
    seeds: Sequence[int] = (),
    *,
    race: bool = False,
) -> dict[str, Any]:
    """Sample once, then train and measure each arm that is not measured yet; all results, and under "race"
    the measured speedups of the trained arms where `race` asks for them.

    `seeds` are those of training alone (its batches and what else it draws), and each arm is trained with
    each; the samples stay those of the recipe's seed, the only one where none is given. Raises `UserError`
    for an unknown arm, where the recipe does not take an arm's settings or trains heads, and where there is
    nothing to race.
    """
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise UserError(f"there is no arm {unknown[0]!r}; there are: {', '.join(ARMS)}")
    if race and not set(arms) - set(UNTRAINED):
        raise UserError(f"--race measures trained arms, and {', '.join(arms)} are none: add another arm")
    shared = [f"sample.tokens={tokens}", f"train.tokens={tokens}", *sets]
    # All recipes first: a setting that does not fit is found before any work
    recipes = {arm: load_recipe(name, [*shared, *ARMS[arm]]) for arm in arms}
    recipe = load_recipe(name, shared)
    if recipe.draft.kind != "model":
        raise UserError(
            f"recipe {recipe.name} trains heads, whose arms are not measured here: choose a recipe of kind "
            "model, or compare kinds with `distill bench kinds`."
        )

    from distill import pipeline

    pipeline.run(recipe, runs_dir, "sample", fresh=False, say=say)
    root = runs_dir / recipe.name
    results: dict[str, Any] = {}
    kept: dict[str, Path] = {}
    with recipe_lock(root), ExitStack() as stack:
        base = Run(recipe, runs_dir, say, stack)
        requests = race_requests(base) if race else []
        seeds = seeds or (recipe.seed,)
        for seed, (arm, own) in itertools.product(seeds, recipes.items()):
            if arm in UNTRAINED and seed != seeds[0]:
                continue
            run = Run(own, runs_dir, say, stack)
            label = arm if len(seeds) == 1 or arm in UNTRAINED else f"{arm}, seed {seed}"
            key = canonical_hash([run.stages["train"].key, own.serving.model_dump()])
            result = root / "alignment" / f"{arm}-{key}-{seed}.json"
            scratch = result.with_suffix("")
            if race and arm not in UNTRAINED:
                kept[label] = scratch.with_name(f"{scratch.name}-drafter")
            if not result.exists() or (label in kept and not kept[label].exists()):
                say(f"bench alignment: {arm}, seed {seed}")
                # Loaded once for all
                run.target, run.samples = base.target, base.samples
                write_json(result, _measure_arm(arm, run, seed, scratch, kept.get(label)))
            results[label] = read_json(result)
        raced = _race(base, results, kept, requests, say) if race else {}
    test = base.samples.where(split="test")
    return {
        "recipe": recipe.name,
        "settings": shared,
        "tokens": recipe.train.tokens,
        "sampled_tokens": base.samples.where(split="train").completion_tokens,
        "learning_rate": recipe.train.learning_rate,
        "seeds": list(seeds),
        "temperature": base.signal_temperature,
        "test_samples": len(test),
        "test_tokens": test.completion_tokens,
        "environment": environment(),
        "arms": results,
        "race": raced,
    }


def _race(
    base: Run, results: dict[str, Any], kept: dict[str, Path], requests: Sequence[Request], say: Say
) -> dict[str, Any]:
    """The arms' drafters in `kept`, look-up and plain decoding in turns, at the recipe's serving mode."""
    from distill.models import load_drafter

    size = base.recipe.serving.batch_size
    say(f"bench alignment: {len(requests)} prompts by batches of {size}")
    contestants = [
        contestant(
            label,
            load_drafter(folder, base.device),
            base.target.model,
            counts=list(COUNTS),
            minutes=None if results[label]["resumed"] else results[label]["seconds"] / 60,
            trained_tokens=base.recipe.train.tokens,
        )
        for label, folder in kept.items()
    ]
    return {
        "prompts": len(requests),
        "new_tokens": base.recipe.evaluate.max_new_tokens,
        "rows": race_drafters(base, contestants, requests, size),
    }


def _measure_arm(arm: str, run: Run, seed: int, scratch: Path, kept: Path | None) -> dict[str, Any]:
    """Train one arm in `scratch`, which is deleted then, and measure it; its drafter goes to `kept`."""
    test = run.samples.where(split="test")
    about = {"arm": arm, "seed": seed, "commit": environment()["commit"]}
    if arm == "ngram":
        rows = sample_rows(ngram_table(run, test), test)
        return {**about, "seconds": 0.0, "resumed": False, "costs": None, "samples": rows}
    drafter = run.initial_drafter()
    resumed, begin = scratch.exists(), monotonic()
    if arm == "gkd":
        from distill.bench.gkd import train_gkd

        train_gkd(drafter, run.target, run.samples, run.recipe.train, seed=seed, out_dir=scratch)
    elif arm != "start":
        _train(drafter, run, seed, scratch)
    seconds = monotonic() - begin
    found = {
        **about,
        "seconds": seconds,
        "resumed": resumed,  # then the seconds are those of the last session alone
        "costs": _costs(drafter, run),
        "samples": sample_rows(_table(drafter, run, test), test),
    }
    if kept is not None:
        from distill.models import save_drafter

        save_drafter(drafter, kept)
    shutil.rmtree(scratch, ignore_errors=True)
    return found


def _train(drafter: DraftModel, run: Run, seed: int, scratch: Path) -> None:
    """Train `drafter` in place to its last step."""
    from distill.progress import Progress
    from distill.train import train_drafter

    with Progress("train", run.recipe.train.tokens) as progress:

        def report(step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
            progress.to(tokens, ", ".join(f"{name} {value:.3f}" for name, value in measures.items()))

        train_drafter(
            drafter,
            run.target,
            run.samples,
            run.recipe.train,
            temperature=run.signal_temperature,
            seed=seed,
            out_dir=scratch,
            report=report,
            metric=run.metric,
        )


def _costs(drafter: DraftModel, run: Run) -> dict[str, Any]:
    from evaluation.cost_model import measure_by_batch

    (costs,) = measure_by_batch(run.target.model, drafter, COUNTS, [run.recipe.serving.batch_size])
    return costs


def _table(drafter: DraftModel, run: Run, samples: Samples) -> AcceptanceTable:
    from functools import partial

    from evaluation.acceptance import teacher_forced
    from evaluation.head import head_of
    from evaluation.signals import target_signals

    temperature = run.signal_temperature
    live = partial(target_signals, run.target.model, temperature=temperature)
    return teacher_forced(
        drafter,
        head_of(run.target.model).detached(),
        samples,
        temperature=temperature,
        batch_size=2 * run.recipe.train.batch_size,
        signals=None if samples.has_exact_signals(run.target.model.dtype) else live,
        target=run.target.model,
    )


def ngram_table(run: Run, samples: Samples) -> AcceptanceTable:
    """The acceptances of prompt look-up, which proposes one id or none at each position: sampled or chosen,
    it is accepted with the target's probability of that id."""
    import torch

    from data.records import collate
    from data.signals import Signals
    from evaluation.acceptance import AcceptanceTable
    from evaluation.decoder.ngram import NgramDrafter
    from evaluation.head import head_of
    from evaluation.signals import target_signals

    head = head_of(run.target.model).detached()
    drafter, temperature = NgramDrafter(), run.signal_temperature
    columns: tuple[list[torch.Tensor], ...] = ([], [], [])
    for index, record in enumerate(samples):
        batch = collate(samples, [index], run.target.pad_id)
        told = batch.signals
        if not isinstance(told, Signals):  # not kept, or the most likely ids alone
            told = target_signals(run.target.model, batch, temperature)
        places = [place for place, trained in enumerate(record.completion_mask) if trained]
        found = [(drafter.look_up(record.input_ids[:place], 1) or [-1])[0] for place in places]
        device = head.weight_VH.device
        ids, hidden = torch.tensor(found, device=device), told.hidden.to(device)
        own = head.rows(ids.clamp(min=0))
        product = (hidden.to(own.weight_VH.dtype) * own.weight_VH).sum(-1).float()
        logits = own.shaped(product if own.bias_V is None else product + own.bias_V.float()) / temperature
        probs = torch.where(ids >= 0, (logits - told.logsumexp.to(device)).exp(), 0.0).clamp(max=1)
        owner, right = torch.full((len(places),), index), (ids == told.argmax.to(device)).float()
        for column, values in zip(columns, (probs, right, owner), strict=True):
            column.append(values.cpu())
    accepted, greedy, owner = (torch.cat(column) for column in columns)
    return AcceptanceTable(accepted, accepted, greedy, owner)


def sample_rows(table: AcceptanceTable, samples: Samples) -> list[dict[str, Any]]:
    """For each sample its tokens, the sums of the three acceptances over them, and the target calls that
    decoding it with K drafts a round would take: along greedy text by `greedy`, else by `sampled`."""
    import torch

    order = torch.argsort(table.sample, stable=True)
    sizes = torch.bincount(table.sample, minlength=len(samples)).tolist()
    parts = [values[order].double().split(sizes) for values in (table.sampled, table.argmax, table.greedy)]
    rows = []
    for record, sampled, argmax, greedy in zip(samples, *parts, strict=True):
        accepted = greedy if record.temperature == 0 else sampled
        rows.append(
            {
                "task": record.task,
                "seen": record.seen_template,
                "temperature": record.temperature,
                "tokens": len(sampled),
                "sampled": float(sampled.sum()),
                "argmax": float(argmax.sum()),
                "greedy": float(greedy.sum()),
                **{f"calls_{count}": target_calls(accepted.tolist(), count) for count in COUNTS},
            }
        )
    return rows


def target_calls(accepted: Sequence[float], count: int) -> float:
    """Expected target calls to decode a text with `count` drafts a round, where the draft of token i is
    accepted with probability `accepted[i]` given that those before it were; its first token is the
    prefill's.

        calls(i) = 1 + sum_a P(a accepted at i) calls(i + a + 1),    calls(end) = 0
    """
    end = len(accepted)
    calls = [0.0] * (end + count + 2)
    for place in range(end - 1, 0, -1):
        total, reach = 1.0, 1.0
        for ahead in range(count):
            chance = accepted[place + ahead] if place + ahead < end else 0.0
            total += reach * (1 - chance) * calls[place + ahead + 1]
            reach *= chance
        calls[place] = total + reach * calls[place + count + 1]
    return calls[1]
