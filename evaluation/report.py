"""The page: one self-contained HTML file about one candidate, or about several compared.

It holds everything it shows (inline SVG and style, no script, no address is opened), follows the reader's
light or dark mode, and escapes every text that came from a model, a recipe or a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.comparison import candidate_table, kinds_table
from evaluation.cost_model import chain_or_tree
from evaluation.figures import COLOURS, HATCHES, Plot, errors, finish, literal, new_figure, plain_line
from evaluation.lossless import describe
from evaluation.plots import draw_plots
from evaluation.selection import RankedGroup
from evaluation.tables import draw_tables, subtitle
from evaluation.verdict import is_lossless, pays, standing, why

_MARKS = {"good": "YES:", "unclear": "UNCLEAR:", "bad": "NO:"}


def candidate_page(
    evaluation: Mapping[str, Any], history: Sequence[Mapping[str, float]], name: str, recipe: str
) -> str:
    """The report of one drafter. `history`: what training measured on its way; `recipe`: its text."""
    decided = standing(evaluation["best"]["speedup"])
    worst = is_lossless(evaluation) is False or decided == "does not pay"
    mood = "good" if pays(evaluation) else "bad" if worst else "unclear"
    certificate = evaluation.get("certificate")
    return render_page(
        title=f"Drafter {name}",
        subtitle=subtitle(evaluation),
        verdict=evaluation["best"]["verdict"],
        standing=mood,
        mark=_MARKS[mood],
        notes=[why(evaluation), *_notes(evaluation)],
        plots=draw_plots(evaluation, history),
        tables=list(draw_tables(evaluation).items()),
        certificate=describe(certificate) if certificate else "There is none: nothing may be promoted.",
        recipe=recipe,
        origin=_origin(evaluation),
    )


def comparison_page(groups: Sequence[RankedGroup]) -> str:
    """All candidates of all groups, with the fastest of each group in the headline."""
    verdicts = [_leader(group) for group in groups if group.rows and group.rows[0].place == 1]
    return render_page(
        title="Drafters compared",
        subtitle="Only candidates of one target, serving mode, data and machine compare.",
        verdict=" ".join(verdicts) or "No candidate has a measured speedup yet.",
        standing="unclear",
        mark="",
        notes=[],
        plots=[plot for number, group in enumerate(groups) if (plot := _plot_group(group, number))],
        tables=[
            table
            for group in groups
            for table in (("Candidates", candidate_table(group)), ("Costs and gains", kinds_table(group)))
        ],
        certificate="",
        recipe="",
        origin="distill compare",
    )


def _leader(group: RankedGroup) -> str:
    row = group.rows[0].row
    ties = [other.row.label for other in group.rows if other.tied]
    tied = f", tied with {', '.join(ties)}" if ties else ""
    interval = "" if row.speedup_low is None else f" [{row.speedup_low:.2f}, {row.speedup_high:.2f}]"
    speedup = f"{row.speedup:.2f}x{interval} over plain decoding"
    return f"Fastest for {group.serving}: {row.label}{tied}, {speedup}."


def _plot_group(group: RankedGroup, number: int) -> Plot | None:
    """Measured speedups with their intervals, fastest first."""
    rows = [ranked.row for ranked in group.rows if ranked.place]
    if not rows:
        return None
    figure, axes = new_figure()
    spans = [{"mean": row.speedup, "low": row.speedup_low, "high": row.speedup_high} for row in rows]
    axes.bar(
        range(len(rows)),
        [row.speedup or 0.0 for row in rows],
        0.6,
        yerr=errors(spans),  # type: ignore[arg-type]
        capsize=4,
        color=COLOURS[0],
        hatch=HATCHES[1],
        edgecolor="white",
        ecolor="black",
        label="measured, with its 95 % interval",
    )
    plain_line(axes)
    axes.set_xticks(range(len(rows)), [literal(row.label) for row in rows], fontsize=8)
    axes.set_ylabel("speedup over plain decoding")
    table = [[row.label, *span.values()] for row, span in zip(rows, spans, strict=True)]
    heading = ["candidate", "speedup", "low", "high"]
    return finish(figure, axes, f"speedups-{number}", f"Speedup, {group.serving}", heading, table)


def _notes(evaluation: Mapping[str, Any]) -> list[str]:
    """Where the time goes, and whether the decoder accepts what teacher forcing foretells."""
    found = []
    shares = (evaluation.get("cost") or {}).get("time_shares")
    if shares:
        found.append(
            f"Where the time goes: {shares['target_step']:.0%} target steps that plain decoding takes too, "
            f"{shares['drafting']:.0%} drafting, {shares['wider_check']:.0%} checking several tokens at once."
        )
    best = (evaluation.get("cost_model") or {}).get("best") or []
    if best and "chain" in best[0]:
        found.append(chain_or_tree(best))
    if replay := evaluation.get("replay"):
        same = f"{replay['same_rounds']} of {replay['prompts']} outputs"
        found.append(f"Rounds equal those that teacher-forced matches foretell for {same}.")
    excess = [row for row in evaluation.get("decode") or [] if row.get("excess_bug")]
    if excess or (replay or {}).get("bug"):
        found.append(
            "BUG: the decoder accepts significantly more drafts than its rule can; trust no speed here."
        )
    return found


def _origin(evaluation: Mapping[str, Any]) -> str:
    machine = evaluation.get("machine") or {}
    names = ("commit", "torch", "transformers", "python")
    known = [f"{name} {machine[name]}" for name in names if name in machine]
    known += [str(evaluation["dtype"])] if "dtype" in evaluation else []
    return "; ".join([*known, f"data {evaluation.get('data_digest', 'unknown')}"])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def render_page(**content: Any) -> str:
    """The template report.html filled in; every name in it must be given."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["cell"] = _cell
    return environment.get_template("report.html").render(**content)
