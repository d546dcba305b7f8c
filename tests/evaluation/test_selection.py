"""Ranking and choosing candidates, first as pure logic, then against a real MLflow store."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evaluation.comparison import render, to_json
from evaluation.measures import as_served, candidate_metrics, candidate_params, headline_acceptance
from evaluation.registry import BatchSpeed, CandidateRow, candidates
from evaluation.selection import newest, rank, select
from evaluation.store import open_client


def row(loss: str, speedup: float | None, **changes: Any) -> CandidateRow:
    base = CandidateRow(
        model_id=f"m-{loss}",
        name="demo",
        version="1",
        drafter_digest=loss,
        measured_at=1,
        target="t",
        recipe="demo",
        loss=loss,
        layers="0,1",
        tokens=1000,
        num_speculative_tokens=4,
        greedy=0.9,
        sampled=0.8,
        argmax=0.7,
        tokens_per_target_call=4.0,
        speedup=speedup,
        speedup_low=None if speedup is None else speedup - 0.1,
        speedup_high=None if speedup is None else speedup + 0.1,
        cost_ratio=0.1,
        lossless=True,
        serving="temperature 0, batch 1",
        data_digest="d1",
        machine="cpu, 2 cores",
    )
    return replace(base, **changes)


def test_rank_sorts_by_measured_speedup_and_names_ties() -> None:
    rows = [row("slow", 0.9), row("near", 1.9), row("lead", 2.0), row("far", 1.5), row("none", None)]
    (group,) = rank(rows)
    assert [(ranked.place, ranked.row.loss, ranked.tied) for ranked in group.rows] == [
        (1, "lead", False),
        (2, "near", True),
        (3, "far", False),
        (4, "slow", False),
        (0, "none", False),
    ]
    assert "tied" in group.rows[1].note
    assert "slower than plain" in group.rows[3].note
    assert "not measured" in group.rows[4].note


@pytest.mark.parametrize("field", ["target", "serving", "data_digest", "machine"])
def test_what_differs_in_target_mode_data_or_machine_is_not_ranked_together(field: str) -> None:
    groups = rank([row("a", 2.0), row("b", 1.0, **{field: "other"})])
    assert [len(group.rows) for group in groups] == [1, 1]
    assert all(group.rows[0].place == 1 for group in groups)


def test_the_newest_measurement_of_the_same_weights_wins_and_is_no_average() -> None:
    old = row("a", 3.0, measured_at=1, champion=True, model_id="m-old")
    new = row("a", 2.0, measured_at=2, model_id="m-new")
    for order in ([old, new], [new, old]):
        (kept,) = newest(order)
        assert (kept.model_id, kept.speedup, kept.champion) == ("m-new", 2.0, True)
    elsewhere = row("a", 5.0, machine="other")
    assert len(newest([old, new, elsewhere])) == 2


def test_a_drafter_that_stops_early_has_no_fixed_k() -> None:
    out = io.StringIO()
    Console(file=out, width=220).print(render(rank([row("a", 2.0, stops_early=True), row("b", 1.0)])))
    assert "up to 4" in out.getvalue() and out.getvalue().count("up to") == 1


def test_render_and_json_hold_every_candidate_and_escape_names() -> None:
    groups = rank([row("a", 2.0, name="x[red]y"), row("b", 1.0, data_digest="d2")])
    out = io.StringIO()
    Console(file=out, width=200).print(render(groups))
    text = out.getvalue()
    assert "x[red]y v1" in text
    assert "2.00x [1.90, 2.10]" in text
    assert "d1" in text and "d2" in text
    loaded = json.loads(json.dumps(to_json(groups)))
    assert [group["rows"][0]["row"]["speedup"] for group in loaded["groups"]] == [2.0, 1.0]
    empty = io.StringIO()
    Console(file=empty).print(render([]))


EVALUATION: dict[str, Any] = {
    "machine": {"cpu": "x86", "cores": 2, "torch": "2", "commit": "abc"},
    "data_digest": "d1",
    "serving": {"temperature": 0.0, "top_p": 1.0, "draft_sampling": "sampled", "batch_size": 1},
    "acceptance": [
        {
            "split": split,
            "task": task,
            "temperature": temperature,
            "tokens": 10,
            "samples": 2,
            "sampled": {"mean": 0.8 + temperature / 100, "low": 0.7, "high": 0.9},
            "argmax": {"mean": 0.7 + temperature / 100, "low": 0.6, "high": 0.8},
            "greedy": {"mean": 0.9 + temperature / 100, "low": 0.8, "high": 0.95},
        }
        for split in ("unseen", "seen")
        for task in ("json", "all")
        for temperature in (1.0, 0.0)
    ],
    "decode": [
        {
            "drafter": drafter,
            "split": "seen",
            "num_speculative_tokens": k,
            "prompts": 30,
            "tokens_per_target_call": {"mean": k * 0.8, "low": 1, "high": 5},
            "acceptance_rate": 0.8,
            "conditional_acceptance": [0.9, 0.8],
            "unconditional_acceptance": [0.9, 0.72],
            "tokens_per_second": 50.0,
            "plain_tokens_per_second": 22.0,
            "speedup": {"mean": 1 + k / 10, "low": 1.1, "high": 1.9},
            "predicted_speedup": 1.9,
        }
        for drafter in ("ngram", "model")
        for k in (4, 6)
    ],
    "cost": {
        "cost_ratio": 0.15,
        "verify_overhead": {"4": 0.3},
        "draft_step_ms": float("nan"),
        "first_draft_step_ms": 2.0,
        "target_step_ms": 10.0,
    },
    "drafter_bytes": 1_500_000,
    "batches": [
        {
            "drafter": "model",
            "split": "seen",
            "num_speculative_tokens": 5,
            "batch_size": 4,
            "speedup": {"mean": 1.16},
        }
    ],
    "cost_model": {
        "best": [{"batch_size": size, "num_speculative_tokens": 4, "speedup": 2 / size} for size in (4, 16)]
    },
    "best": {
        "drafter": "model",
        "num_speculative_tokens": 6,
        "split": "seen",
        "speedup": {"mean": 1.6},
        "verdict": "v",
    },
}


def test_metrics_take_the_headline_from_the_best_row_and_the_right_temperature() -> None:
    metrics = candidate_metrics(EVALUATION)
    assert metrics["speed/speedup"] == metrics["speed/seen/model/k6/speedup"] == 1.6
    assert metrics["decode/num_speculative_tokens"] == 6
    assert metrics["acceptance/greedy"] == pytest.approx(0.90)  # samples at temperature 0
    assert metrics["acceptance/sampled"] == pytest.approx(0.81)  # samples at temperature 1
    assert metrics["acceptance/argmax_temperature"] == 1.0
    assert metrics["acceptance/unseen/t1/json/argmax"] == pytest.approx(0.71)
    assert metrics["decode/seen/ngram/k4/conditional_acceptance/pos_2"] == 0.8
    assert "before/acceptance/greedy" not in metrics
    hot = headline_acceptance(EVALUATION["acceptance"], "greedy", {"temperature": 0.7}, "seen")
    assert hot["temperature"] == 0.0
    assert metrics["speed/first_cost_ratio"] == pytest.approx(0.2) and metrics["draft/bytes"] == 1.5e6
    assert candidate_metrics({}) == {}


@pytest.mark.parametrize(
    ("draft", "shown"),
    [
        ({"init": {"layers": [0, 3]}}, "0,3"),
        ({"init": {"layer_count": 4, "choose_by": "importance"}}, "4 by importance"),
        ({"init": {"width": 360}}, "all, width 360"),
        ({"kind": "medusa", "heads": 3}, "3 heads"),
        ({"kind": "eagle"}, "1 on features"),
        ({}, "all"),
    ],
)
def test_a_drafter_is_shown_as_what_it_is_made_of(draft: dict[str, Any], shown: str) -> None:
    assert candidate_params({"draft": draft}, {}, "r")["layers"] == shown


def test_acceptance_as_served_is_the_modes_own_at_the_nearest_temperature() -> None:
    rows = [{"temperature": heat} for heat in (0.0, 1.0, 0.0)]
    assert as_served(rows, {}) == ("greedy", 0.0, [rows[0], rows[2]])
    assert as_served(rows[1:2], {"temperature": 0.0}) == ("greedy", 1.0, [rows[1]])
    sampling = {"temperature": 0.8, "draft_sampling": "argmax"}
    assert as_served(rows, sampling) == ("argmax", 1.0, [rows[1]])


Register = Callable[..., str]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Register]:
    """A store, and a function that puts a candidate there as `distill.tracking` does."""
    directory = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{directory / 'mlflow.db'}"
    client = open_client(uri)

    def register(name: str, speedup: float, half: float, status: str = "READY", **changes: Any) -> str:
        from mlflow.entities import Metric

        experiment = client.get_experiment_by_name(name)
        location = (directory / "artifacts").as_uri()
        experiment_id = (
            experiment.experiment_id
            if experiment
            else client.create_experiment(name, artifact_location=location)
        )
        run = client.create_run(experiment_id)
        evaluation = {**EVALUATION, **{k: v for k, v in changes.items() if k in EVALUATION}}
        certificate = changes.get("lossless", True)
        numbers = candidate_metrics(evaluation) | {
            **({} if certificate is None else {"lossless/holds": float(certificate)}),
            "speed/speedup": speedup,
            "speed/speedup_low": speedup - half,
            "speed/speedup_high": speedup + half,
        }
        model = client.create_logged_model(
            experiment_id,
            name=name,
            source_run_id=run.info.run_id,
            tags={"drafter_digest": changes.get("weights", os.urandom(4).hex())},
            params=candidate_params(
                {"target": {"model": "t"}, "train": {"loss": {"name": "tvd"}, "tokens": 99}}, evaluation, name
            ),
            model_type="drafter",
        )
        now = changes.get("now", 1)
        digest = evaluation["data_digest"]
        client.log_batch(
            run.info.run_id,
            metrics=[
                Metric(key, value, now, 0, model.model_id, "held-out", digest)
                for key, value in numbers.items()
            ],
        )
        if not client.search_registered_models(f"name='{name}'"):
            client.create_registered_model(name)
        client.create_model_version(
            name,
            model.artifact_location,
            run_id=run.info.run_id,
            tags={"model_id": model.model_id},
            model_id=model.model_id,
        )
        if status != "PENDING":
            client.finalize_logged_model(model.model_id, status)
        return str(model.model_id)

    return uri, register


def champion(uri: str, name: str) -> str:
    return str(open_client(uri).get_model_version_by_alias(name, "champion").tags["model_id"])


def test_candidates_are_read_back_and_unfinished_ones_are_not(store: tuple[str, Register]) -> None:
    uri, register = store
    ready = register("read", 1.5, 0.1)
    register("read", 9.0, 0.1, status="FAILED")
    register("read", 9.0, 0.1, status="PENDING")
    (found,) = candidates(uri, ["read"])
    assert found.model_id == ready
    assert (found.recipe, found.loss, found.tokens, found.layers) == ("read", "tvd", 99, "all")
    assert (found.speedup, found.speedup_low) == (1.5, 1.4)
    assert found.num_speculative_tokens == 6
    assert found.machine == "x86, 2 cores"
    assert found.data_digest == "d1"
    assert (found.name, found.version, found.champion) == ("read", "1", False)


def test_looking_at_a_store_that_does_not_exist_makes_none(tmp_path: Path) -> None:
    assert candidates(f"sqlite:///{tmp_path / 'mlflow.db'}") == []
    assert list(tmp_path.iterdir()) == []


def test_kinds_stand_side_by_side_with_what_they_bring_and_cost(store: tuple[str, Register]) -> None:
    uri, register = store
    served = {**EVALUATION["decode"][-1], "drafter": "adaptive"}  # with another K than in other batches
    register(
        "kinds",
        1.5,
        0.1,
        decode=[*EVALUATION["decode"], served],
        best={**EVALUATION["best"], "drafter": "adaptive"},
    )
    (found,) = candidates(uri, ["kinds"])
    assert found.by_position == (0.9, 0.8) and found.drafter_bytes == 1.5e6
    assert (found.first_cost_ratio, found.cost_ratio) == (pytest.approx(0.2), 0.15)
    assert found.by_batch == (BatchSpeed(4, pytest.approx(1.16), True), BatchSpeed(16, 0.125, False))
    out = io.StringIO()
    Console(file=out, width=260).print(render(rank([replace(found, training_minutes=2.04)])))
    (line,) = [line for line in out.getvalue().splitlines() if "0.90 0.80" in line]
    for cell in ("model", "0.200", "0.150", "2.0", "1.5", "4: 1.16x, 16: 0.12x predicted"):
        assert cell in line


def test_champion_moves_only_where_the_interval_lies_above(store: tuple[str, Register]) -> None:
    uri, register = store
    client = open_client(uri)
    first = register("duel", 1.5, 0.1)
    decision = select(client, "duel", first)
    assert decision.promoted and "first candidate" in decision.reason
    assert champion(uri, "duel") == first

    better_but_unsure = register("duel", 1.7, 0.25, now=2)
    decision = select(client, "duel", better_but_unsure)
    assert not decision.promoted and "does not lie wholly above" in decision.reason
    assert champion(uri, "duel") == first

    better = register("duel", 1.7, 0.1, now=3)
    assert select(client, "duel", better).promoted
    assert champion(uri, "duel") == better
    assert [row.champion for row in candidates(uri, ["duel"])] == [True, False, False]

    again = select(client, "duel", better)
    assert not again.promoted and "measured again" in again.reason


def test_other_data_or_machine_never_moves_the_champion(store: tuple[str, Register]) -> None:
    uri, register = store
    client = open_client(uri)
    first = register("far", 1.5, 0.1)
    select(client, "far", first)
    for changes in ({"data_digest": "d2"}, {"machine": {"cpu": "gpu"}}, {"serving": {"temperature": 1.0}}):
        decision = select(client, "far", register("far", 9.0, 0.1, **changes))
        assert not decision.promoted and "do not compare" in decision.reason
    assert champion(uri, "far") == first


def test_the_champions_newest_measurement_counts(store: tuple[str, Register]) -> None:
    uri, register = store
    client = open_client(uri)
    select(client, "again", register("again", 3.0, 0.1, weights="same", now=1))
    decision = select(client, "again", register("again", 1.5, 0.1, weights="same", now=2))
    assert not decision.promoted and "measured again" in decision.reason
    assert select(client, "again", register("again", 2.0, 0.1, now=3)).promoted


@pytest.mark.parametrize("lossless", [None, False])
def test_no_certificate_no_promotion(store: tuple[str, Register], lossless: bool | None) -> None:
    uri, register = store
    name = f"uncertified-{lossless}"
    decision = select(open_client(uri), name, register(name, 2.0, 0.1, lossless=lossless))
    assert not decision.promoted and "certificate" in decision.reason
    (group,) = rank(candidates(uri, [name]))
    assert ("NOT lossless" if lossless is False else "no certificate") in group.rows[0].note


def test_a_failed_candidate_cannot_be_selected(store: tuple[str, Register]) -> None:
    uri, register = store
    failed = register("none", 2.0, 0.1, status="FAILED")
    with pytest.raises(ValueError, match="not a finished candidate"):
        select(open_client(uri), "none", failed)


def test_a_quantised_target_is_another_target() -> None:
    rounded = candidate_params({"target": {"model": "org/t", "quantization": "nf4"}}, {}, "r")
    full = candidate_params({"target": {"model": "org/t", "quantization": "none"}}, {}, "r")
    assert (rounded["target"], full["target"]) == ("org/t (nf4)", "org/t")
