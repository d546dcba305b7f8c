"""The closing summary: minutes per stage, acceptance before and after, speed by K, and what that means in a
sentence.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from distill.result import Result

OFF_TERMINAL_WIDTH = 180

_MEASURES = ("greedy", "sampled", "argmax")


def console() -> "Console":
    """Standard output, for tables and wrapped text."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise  # the command line ends, as for any output that nobody reads

    return Quiet(highlight=False, width=None if sys.stdout.isatty() else OFF_TERMINAL_WIDTH)


def print_summary(result: "Result") -> None:
    """Print what a command did and what it found."""
    from evaluation.tables import decode_table
    from evaluation.verdict import pays, why

    out = console()
    out.print(stage_table(result))
    evaluation = result.read("evaluate", "evaluation.json")
    if evaluation is None:
        out.print("Next: distill evaluate, with the same recipe and settings")
        return
    out.print(acceptance_table(evaluation))
    out.print(decode_table(evaluation).rich())
    out.print(evaluation["best"]["verdict"], markup=False)
    if evaluation.get("certificate"):
        from evaluation.lossless import describe

        out.print(describe(evaluation["certificate"]), markup=False)
    if not pays(evaluation):
        out.print(why(evaluation), markup=False)
        if evaluation.get("kind") != "medusa":  # its drafts come at once, so no step of its own has a cost
            out.print(prediction_table(evaluation))
    selection = result.read("select", "selection.json")
    if selection is not None:
        standing = "is now champion" if selection["promoted"] else "is not champion"
        out.print(
            f"{selection['name']} version {selection['version']} {standing}: {selection['reason']}",
            markup=False,
        )
    if "export" in result.outcomes:
        for line in export_lines(result):
            out.print(line, markup=False, soft_wrap=True)
    if (verified := result.read("export", "verification.json")) is not None:
        equal = f"{verified['identical']} of {verified['prompts']} outputs equal plain decoding"
        per_call = f"{verified['tokens'] / verified['target_calls']:.2f} tokens per target call"
        warning = "" if verified["identical"] == verified["prompts"] else "WARNING: "
        out.print(f"{warning}transformers loads it as assistant_model: {equal}, {per_call}.")
    out.print(advice(evaluation), markup=False)


def export_lines(result: "Result") -> list[str]:
    """Where each exported format lies, and the lines that serve it with llama.cpp where it can load it."""
    from distill.export.command import commands

    lines = []
    for kind in result.recipe.export.formats:
        folder = result.outcomes["export"].stage.directory / kind
        if found := commands(folder, kind):
            lines.append(f"Ready to serve: {folder}; here, for instance:")
            lines += [f"  {line}" for line in found]
        else:
            lines.append(f"Exported: {folder}; what loads it stands in its README.md.")
    return lines


def stage_table(result: "Result") -> "Table":
    """Minutes per stage, and whether it was done now."""
    table = _table(f"Recipe {result.recipe.name}", ("stage", "state"), ("minutes",))
    table.add_row("prepare", "target and prompts", f"{result.prepare_seconds / 60:.2f}")
    for name, outcome in result.outcomes.items():
        state = "done before" if outcome.skipped else "resumed" if outcome.resumed else "done"
        table.add_row(name, state, f"{outcome.seconds / 60:.2f}")
    spent = [outcome.seconds for outcome in result.outcomes.values() if not outcome.skipped]
    table.add_row("in this run", "", f"{(result.prepare_seconds + sum(spent)) / 60:.2f}", style="bold")
    return table


def acceptance_table(evaluation: Mapping[str, Any]) -> "Table":
    """The three acceptances over all tasks, before and after training, by unseen fills and unseen
    templates.
    """
    from evaluation.tables import split_heading

    words = (split_heading(evaluation), "temperature")
    table = _table("Acceptance per token, before -> after training", words, (*_MEASURES, "tokens"))
    before = {(row["split"], row["temperature"]): row for row in _overall(evaluation, "acceptance_before")}
    for row in _overall(evaluation, "acceptance"):
        earlier = before.get((row["split"], row["temperature"]), {})
        cells = [f"{_mean(earlier.get(name))} -> {_mean(row.get(name))}" for name in _MEASURES]
        table.add_row(row["split"], f"{row['temperature']:g}", *cells, f"{row['tokens']:,}")
    return table


def prediction_table(evaluation: Mapping[str, Any]) -> "Table":
    """What the cost model predicts for this drafter where a draft step costs another share of a target
    step.
    """
    from evaluation.tables import number

    best, here = evaluation["best"], float(evaluation["cost"]["cost_ratio"])
    predicted = {float(ratio): value for ratio, value in best["predicted_speedup_at_cost_ratio"].items()}
    title = f"Predicted speedup at K = {best['num_speculative_tokens']} where a draft step costs ..."
    table = _table(title, ("of a target step",), ("speedup",))
    for ratio, value in sorted(predicted.items()):
        table.add_row(f"{ratio:.0%}", f"{value:.2f}x")
    predicted_here = number(_best_row(evaluation).get("predicted_speedup"))
    table.add_row(f"{here:.0%} (this machine)", f"{predicted_here}x")
    return table


def advice(evaluation: Mapping[str, Any]) -> str:
    """What to do next, from what the measures say is in the way."""
    from evaluation.verdict import pays, standing

    rows = {row["split"]: row for row in evaluation["decode"] if _at_best(evaluation, row)}
    seen, unseen = (rows.get(split, {}).get("speedup", {}).get("mean") for split in ("seen", "unseen"))
    where = evaluation["best"]["split"]
    ngram = [
        row["speedup"]["mean"]
        for row in evaluation["decode"]
        if row["drafter"] == "ngram" and row["split"] == where and standing(row["speedup"]) == "pays"
    ]
    if ngram and max(ngram) > evaluation["best"]["speedup"]["mean"]:
        return "Next: n-gram look-up is faster here and needs no drafter: serve that, or sample more tokens."
    if not pays(evaluation):
        if evaluation.get("kind", "model") != "model":
            return "Next: more sampled tokens raise acceptance; a smaller draft.vocab_size costs less."
        return "Next: fewer drafter layers lower the cost of a step; more sampled tokens raise acceptance."
    if seen is not None and unseen is not None and unseen < 0.75 * seen:
        return (
            f"Next: templates it has never seen reach {unseen:.2f}x only, so add prompts of every kind that "
            "you serve (data.prompts: file:PATH) before you use it for others."
        )
    return "Next: serve the export with the command lines in its README, and measure there too."


def _at_best(evaluation: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    best = evaluation["best"]
    return all(row[key] == best[key] for key in ("drafter", "num_speculative_tokens"))


def _best_row(evaluation: Mapping[str, Any]) -> Mapping[str, Any]:
    from evaluation.measures import best_decode

    return best_decode(evaluation)


def _overall(evaluation: Mapping[str, Any], rows: str) -> list[Mapping[str, Any]]:
    return [row for row in evaluation.get(rows) or [] if row["task"] == "all"]


def _mean(interval: Mapping[str, float] | None) -> str:
    return "-" if not interval else f"{interval['mean']:.3f}"


def _table(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in words:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table
