"""Which drafter to serve: read the candidates from MLflow, rank them, decide who is champion.

A *candidate* is one LoggedModel; a *measurement* is what one evaluation says about it: the numbers, the
digest of the evaluation data, the machine and the serving mode. Measurements compare only inside one group
(same target, serving mode, data and machine), because a speedup is a property of all four. The same weights
measured again in the same group are a new measurement that replaces the older one; they are never averaged.

`evaluation.measures` names the numbers.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.files import commit_file
from evaluation.tables import TextTable, number

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from rich.table import Table

CHAMPION = "champion"
MODEL_TYPE = "drafter"
NO_CERTIFICATE = "It has no losslessness certificate that holds: evaluate it again, and see its report."


@dataclass(frozen=True)
class CandidateRow:
    """One measurement of one candidate. Acceptances and the cost ratio are fractions; speedups are over
    plain.
    """

    model_id: str
    name: str
    """Registered model, empty when the candidate was never registered."""
    version: str
    drafter_digest: str
    """Digest of the weights: what makes two LoggedModels the same candidate."""
    measured_at: int
    """Milliseconds since 1970."""
    target: str
    recipe: str
    loss: str
    layers: str
    tokens: int | None
    """Completion tokens trained on."""
    num_speculative_tokens: int | None
    greedy: float | None
    sampled: float | None
    argmax: float | None
    tokens_per_target_call: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    cost_ratio: float | None
    serving: str
    data_digest: str
    machine: str
    champion: bool = False
    bugs: int = 0
    """Outputs that differ from plain decoding by more than a near tie."""
    lossless: bool | None = None
    """What its certificate says; None where it has none."""
    stops_early: bool = False
    """Its headline path drafts up to `num_speculative_tokens` tokens, not always as many."""
    kind: str = "model"
    """A causal LM of its own, or heads on the target: "medusa" or "eagle"."""

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Measurements with the same group compare; others do not."""
        return (self.target, self.serving, self.data_digest, self.machine)

    @property
    def label(self) -> str:
        return f"{self.name} v{self.version}" if self.name else self.model_id


@dataclass(frozen=True)
class Ranked:
    """A row, its place (1 = fastest) in its group, and whether its interval overlaps the leader's."""

    place: int
    row: CandidateRow
    tied: bool
    note: str


@dataclass(frozen=True)
class RankedGroup:
    target: str
    serving: str
    data_digest: str
    machine: str
    rows: tuple[Ranked, ...]


@dataclass(frozen=True)
class Decision:
    """What `select` did, and why."""

    model_id: str
    version: str
    promoted: bool
    reason: str


# Reading MLflow


def open_client(tracking_uri: str) -> MlflowClient:
    """A client bound to `tracking_uri`, registry included, that leaves MLflow's global state alone.

    MLflow's usage reports to its makers are turned off unless the environment says otherwise, and so are its
    progress bars, its links to a server's pages and the log of a new database's migrations.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault(
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3"
    )  # the default waits minutes for a dead server
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")  # seconds; 120 by default
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is for --json
    from mlflow import MlflowClient

    for name in ("alembic", "mlflow.store.db.utils", "mlflow.store.model_registry"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if tracking_uri.startswith("sqlite:///"):
        _make_store(Path(tracking_uri.removeprefix("sqlite:///")))
    return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


def _make_store(path: Path) -> None:
    """Make a new database whole or not at all: MLflow's migrations cannot be resumed where a process
    was killed between them.
    """
    if path.exists() or not path.parent.is_dir():
        return
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp") as scratch:
        made = Path(scratch) / path.name
        store = SqlAlchemyStore(f"sqlite:///{made}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
        store._dispose_engine()  # what its journal holds comes into the file
        commit_file(made, path)


def candidates(tracking_uri: str, experiments: Sequence[str] | None = None) -> list[CandidateRow]:
    """Every measurement in the named experiments (all of them by default), newest first; READY models only.

    A local database that does not exist yet has no candidates, and is not created by looking.
    """
    if tracking_uri.startswith("sqlite:///") and not Path(tracking_uri.removeprefix("sqlite:///")).exists():
        return []
    return _read(open_client(tracking_uri), experiments)


def _read(client: MlflowClient, experiments: Sequence[str] | None = None) -> list[CandidateRow]:
    wanted = [
        experiment.experiment_id
        for experiment in _pages(client.search_experiments)
        if experiments is None or experiment.name in experiments
    ]
    models = _pages(client.search_logged_models, experiment_ids=wanted) if wanted else []
    versions = _versions(client)
    rows = [
        row
        for model in models
        if str(model.status) == "READY" and model.model_type == MODEL_TYPE
        for row in _measurements(model, *versions.get(model.model_id, ("", "", False)))
    ]
    return sorted(rows, key=lambda row: row.measured_at, reverse=True)


def _pages(search: Any, **arguments: Any) -> list[Any]:
    page = search(**arguments)
    found = list(page)
    while page.token:
        page = search(**arguments, page_token=page.token)
        found += page
    return found


def _versions(client: MlflowClient) -> dict[str, tuple[str, str, bool]]:
    """model id -> (registered name, newest version, is champion).

    The SQL store keeps no model id with a version, hence our own tag.
    """
    champions = {
        (model.name, str(version))
        for model in _pages(client.search_registered_models)
        for alias, version in model.aliases.items()
        if alias == CHAMPION
    }
    found: dict[str, tuple[str, str, bool]] = {}
    for version in sorted(_pages(client.search_model_versions), key=lambda version: int(version.version)):
        model_id = version.tags.get("model_id")
        if model_id:
            key = (version.name, str(version.version))
            was_champion = found.get(model_id, ("", "", False))[2]
            found[model_id] = (*key, key in champions or was_champion)
    return found


def _measurements(model: Any, name: str, version: str, champion: bool) -> list[CandidateRow]:
    """One row per evaluation data set that the LoggedModel holds numbers for, each number its newest."""
    by_digest: dict[str, dict[str, Any]] = {}
    for metric in sorted(model.metrics or [], key=lambda metric: metric.timestamp):
        by_digest.setdefault(metric.dataset_digest or "", {})[metric.key] = metric
    params, rows = model.params, []
    for digest, metrics in by_digest.items():
        value = {key: metric.value for key, metric in metrics.items()}
        chosen = value.get("decode/num_speculative_tokens")
        rows.append(
            CandidateRow(
                model_id=model.model_id,
                name=name,
                version=version,
                drafter_digest=model.tags.get("drafter_digest", model.model_id),
                measured_at=max(metric.timestamp for metric in metrics.values()),
                target=params.get("target", ""),
                recipe=params.get("recipe", model.name),
                loss=params.get("loss", ""),
                layers=params.get("layers", ""),
                tokens=int(params["tokens"]) if params.get("tokens", "").isdigit() else None,
                num_speculative_tokens=None if chosen is None else int(chosen),
                greedy=value.get("acceptance/greedy"),
                sampled=value.get("acceptance/sampled"),
                argmax=value.get("acceptance/argmax"),
                tokens_per_target_call=value.get("decode/tokens_per_target_call"),
                speedup=value.get("speed/speedup"),
                speedup_low=value.get("speed/speedup_low"),
                speedup_high=value.get("speed/speedup_high"),
                cost_ratio=value.get("speed/cost_ratio"),
                serving=params.get("serving", ""),
                data_digest=digest,
                machine=params.get("machine", ""),
                champion=champion,
                bugs=int(value.get("decode/bugs", 0)),
                lossless=bool(value["lossless/holds"]) if "lossless/holds" in value else None,
                stops_early=bool(value.get("decode/stops_early", 0)),
                kind=params.get("kind", "model"),
            )
        )
    return rows


# Ranking


def newest(rows: Iterable[CandidateRow]) -> list[CandidateRow]:
    """Of several measurements of the same weights in the same group, the newest; order kept otherwise.

    Weights that are champion under one LoggedModel stay champion in a later measurement under another.
    """
    found: dict[tuple[Any, ...], CandidateRow] = {}
    for row in rows:
        key = (row.drafter_digest, *row.group)
        other = found.get(key, row)
        latest = row if row.measured_at >= other.measured_at else other
        found[key] = replace(latest, champion=row.champion or other.champion)
    return list(found.values())


def rank(rows: Iterable[CandidateRow]) -> list[RankedGroup]:
    """Group, drop what a newer measurement replaces, and sort by measured speedup.

    A row is *tied* when its interval overlaps the leader's: the data do not say which of the two is faster.
    Rows without a measured speedup come last, unplaced (place 0).
    """
    groups: dict[tuple[str, str, str, str], list[CandidateRow]] = {}
    for row in newest(rows):
        groups.setdefault(row.group, []).append(row)
    return [RankedGroup(*key, rows=tuple(_ranked(members))) for key, members in sorted(groups.items())]


def _ranked(rows: list[CandidateRow]) -> list[Ranked]:
    measured = sorted((row for row in rows if row.speedup is not None), key=lambda row: -(row.speedup or 0.0))
    found = []
    for place, row in enumerate(measured, start=1):
        tied = place > 1 and _high(row) >= _low(measured[0])
        notes = ["champion"] if row.champion else []
        if tied:
            notes.append("tied with the leader")
        if (row.speedup or 0.0) < 1.0:
            notes.append("slower than plain decoding")
        if row.lossless is not True:
            notes.append("NOT lossless" if row.lossless is False else "no certificate")
        found.append(Ranked(place, row, tied, "; ".join(notes)))
    return found + [Ranked(0, row, False, "speed not measured") for row in rows if row.speedup is None]


def _low(row: CandidateRow) -> float:
    return row.speedup_low if row.speedup_low is not None else -math.inf


def _high(row: CandidateRow) -> float:
    return row.speedup_high if row.speedup_high is not None else math.inf


def text_table(group: RankedGroup) -> TextTable:
    """The candidates of one group, fastest first."""
    rows: list[tuple[str, ...]] = []
    for ranked in group.rows:
        row = ranked.row
        interval = f" [{_low(row):.2f}, {_high(row):.2f}]" if row.speedup_low is not None else ""
        rows.append(
            (
                str(ranked.place or "-"),
                row.label,
                row.kind,
                row.loss,
                row.layers,
                "-" if row.tokens is None else f"{row.tokens:,}",
                " / ".join(number(value, 3) for value in (row.greedy, row.sampled, row.argmax)),
                ("up to " if row.stops_early else "") + number(row.num_speculative_tokens, 0),
                number(row.tokens_per_target_call),
                "-" if row.speedup is None else f"{row.speedup:.2f}x{interval}",
                number(row.cost_ratio, 3),
                ranked.note,
            )
        )
    heading = (
        *("", "candidate", "kind", "loss", "layers", "tokens", "greedy / sampled / argmax"),
        *("K", "tokens per call", "speedup", "cost ratio", "note"),
    )
    title = f"{group.target}, {group.serving}; data {group.data_digest or 'unknown'}; {group.machine}"
    return TextTable(title, heading, 5, rows)


def render(groups: Sequence[RankedGroup]) -> Table:
    """The comparison for the terminal: one block per group."""
    from rich.table import Table

    page = Table.grid(padding=(0, 0, 1, 0))
    for group in groups:
        page.add_row(text_table(group).rich())
    return page


def to_json(groups: Sequence[RankedGroup]) -> dict[str, Any]:
    """The comparison as plain data, for `--json`."""
    return {"groups": [asdict(group) for group in groups]}


# Choosing


def select(client: MlflowClient, model_name: str, model_id: str) -> Decision:
    """After a run: does the alias `champion` of `model_name` move to candidate `model_id`? Move it, and say
    why.

    It moves where there is no champion yet, or where the candidate's whole speedup interval lies above the
    champion's speedup in the same group (the champion's newest measurement there). Measurements of
    different groups never move it: that takes measuring both in one run. Raises `ValueError` when the
    candidate is not a READY registered version of `model_name`.
    """
    ours = [row for row in _read(client) if row.name == model_name]
    mine = [row for row in ours if row.model_id == model_id]
    if not mine:
        raise ValueError(f"{model_id} is not a finished candidate of the registered model {model_name}.")
    champion = client.get_registered_model(model_name).aliases.get(CHAMPION)
    digests = {row.drafter_digest for row in ours if row.champion}
    champion_rows = [row for row in ours if row.drafter_digest in digests]
    promoted, reason = _judge(
        newest(mine), newest(champion_rows), None if champion is None else str(champion)
    )
    if promoted:
        client.set_registered_model_alias(model_name, CHAMPION, mine[0].version)
    return Decision(model_id, mine[0].version, promoted, reason)


def _judge(
    mine: Sequence[CandidateRow], champion_rows: Sequence[CandidateRow], champion: str | None
) -> tuple[bool, str]:
    """`champion` is the version that holds the alias; `mine` and `champion_rows` hold one row per group."""
    measured = [row for row in mine if row.speedup is not None]
    if not measured:
        return False, "Its speedup was not measured."
    if bugs := sum(row.bugs for row in mine):
        return False, f"{bugs} of its outputs differ from plain decoding by more than a near tie."
    if not all(row.lossless for row in measured):
        return False, NO_CERTIFICATE
    if champion is None:
        return True, f"It is the first candidate under this name: {_said(measured[0])} over plain decoding."
    if not champion_rows:
        return (
            True,
            f"The champion, version {champion}, is no finished candidate any more: {_said(measured[0])}.",
        )
    if measured[0].drafter_digest == champion_rows[0].drafter_digest:
        return False, f"Its weights are the champion's (version {champion}), measured again."
    for row in measured:
        for other in champion_rows:
            if row.group != other.group or other.speedup is None:
                continue
            if _low(row) > other.speedup:
                return (
                    True,
                    f"{_said(row)} lies above the champion's {other.speedup:.2f}x (version {champion}).",
                )
            return False, (
                f"{_said(row)} does not lie wholly above the champion's {other.speedup:.2f}x "
                f"(version {champion})."
            )
    return False, (
        f"The champion, version {champion}, was measured in another mode, on other data or on another "
        "machine, so the two speedups do not compare."
    )


def _said(row: CandidateRow) -> str:
    return f"a speedup of {row.speedup:.2f}x [{_low(row):.2f}, {_high(row):.2f}]"
