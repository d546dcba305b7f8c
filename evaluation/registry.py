"""The candidates and their measurements, read from MLflow.

A *candidate* is one LoggedModel; a *measurement* is what one evaluation says about it: the numbers, the
digest of the evaluation data, the machine and the serving mode. `evaluation.measures` names the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.store import open_client

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION = "champion"
MODEL_TYPE = "drafter"


@dataclass(frozen=True)
class BatchSpeed:
    """The speedup at a batch size that is not served."""

    batch_size: int
    speedup: float
    measured: bool
    """Else it is the cost model's, with its best K."""


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

    by_position: tuple[float, ...] = ()
    """How often the draft at each position stood, once reached."""
    first_cost_ratio: float | None = None
    """Of a round's first draft step, which for Medusa is all of them; `cost_ratio` is that of the others."""
    training_minutes: float | None = None
    drafter_bytes: float | None = None
    by_batch: tuple[BatchSpeed, ...] = ()

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Measurements with the same group compare; others do not."""
        return (self.target, self.serving, self.data_digest, self.machine)

    @property
    def label(self) -> str:
        return f"{self.name} v{self.version}" if self.name else self.model_id


def candidates(tracking_uri: str, experiments: Sequence[str] | None = None) -> list[CandidateRow]:
    """Every measurement in the named experiments (all of them by default), newest first; READY models only.

    A local database that does not exist yet has no candidates, and is not created by looking.
    """
    if tracking_uri.startswith("sqlite:///") and not Path(tracking_uri.removeprefix("sqlite:///")).exists():
        return []
    return read_candidates(open_client(tracking_uri), experiments)


def read_candidates(client: MlflowClient, experiments: Sequence[str] | None = None) -> list[CandidateRow]:
    """The same through a client."""
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
                by_position=_by_position(value),
                first_cost_ratio=value.get("speed/first_cost_ratio"),
                training_minutes=value.get("train/minutes"),
                drafter_bytes=value.get("draft/bytes"),
                by_batch=_by_batch(value),
            )
        )
    return rows


def _by_position(metrics: Mapping[str, float]) -> tuple[float, ...]:
    name = "decode/conditional_acceptance/pos_{}"
    reached = takewhile(lambda place: name.format(place) in metrics, count(1))
    return tuple(metrics[name.format(place)] for place in reached)


def _by_batch(metrics: Mapping[str, float]) -> tuple[BatchSpeed, ...]:
    """What was measured, with the K that the cost model found best there, and else what it predicts."""
    own = r"speed/\w+/model/k\d+/b(\d+)/speedup"
    found: dict[int, BatchSpeed] = {}
    for pattern in (r"speed/predicted_best_speedup/b(\d+)", own):
        for name, value in metrics.items():
            if named := re.fullmatch(pattern, name):
                found[int(named[1])] = BatchSpeed(int(named[1]), value, measured=pattern == own)
    return tuple(found[size] for size in sorted(found))
