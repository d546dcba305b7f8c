"""The pipeline for Medusa and EAGLE heads, for real on tiny models: one set of samples, each kind from end to
end, and the kinds side by side."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.errors import UserError
from data.records import SampleRecord, open_samples, write_shard
from data.signals import Signals
from distill.bench import kinds as bench
from distill.bench.race_report import report
from distill.pipeline import Result, run
from distill.recipe import Recipe, load_recipe
from distill.recipe_file import RecipeError
from evaluation import speed
from tests.distill.test_pipeline import SMALL, quiet

DRAFTS = {
    "medusa": "draft={kind: medusa, heads: 3, vocab_size: 256}",
    "eagle": "draft={kind: eagle, rollout_steps: 2, vocab_size: 256}",
}
COUNTS = "evaluate.num_speculative_tokens=[2]"


def recipe_of(kind: str) -> Recipe:
    change = [DRAFTS[kind], f"export.formats=[{kind}]", "evaluate.tree=true"] if kind in DRAFTS else []
    return load_recipe("smoke", [*SMALL, COUNTS, *change])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(runs: Path) -> dict[str, Result]:
    return {kind: run(recipe_of(kind), runs, "run", fresh=False, say=quiet) for kind in DRAFTS}


@pytest.mark.parametrize("kind", DRAFTS)
def test_each_kind_is_trained_measured_registered_and_exported(
    kind: str, results: dict[str, Result], runs: Path
) -> None:
    from distill.models import load_drafter
    from evaluation.decoder.kinds import kind_of
    from evaluation.registry import candidates
    from evaluation.store import tracking_uri

    result = results[kind]
    evaluation = result.read("evaluate", "evaluation.json")
    assert evaluation is not None and evaluation["kind"] == kind and evaluation["drafter_bytes"] > 0
    assert all(row["identical_outputs"] + row["near_ties"] == row["prompts"] for row in evaluation["decode"])
    assert not evaluation["replay"]["bug"] and evaluation["replay"]["prompts"] > 0
    assert evaluation["replay"]["accepted"] == evaluation["replay"]["replayed"]
    assert evaluation["certificate"]["holds"], evaluation["certificate"]["reasons"]
    assert {row["drafter"] for row in evaluation["decode"]} - {"tree"} == {"model", "adaptive", "ngram"}
    rates = result.read("evaluate", "rank-rates.json")
    assert (rates is None) == (kind == "eagle")
    assert kind in {row.kind for row in candidates(tracking_uri(runs))}
    exported = result.outcomes["export"].stage.directory / kind
    loaded = load_drafter(exported, "cpu")
    assert kind_of(loaded.model.config) == kind and loaded.vocab is not None and len(loaded.vocab) == 256
    assert (exported / "tokenizer.json").is_file() and "serve/" in (exported / "README.md").read_text()
    assert "vllm serve" in (exported / "serve" / "vllm.sh").read_text()


def test_kinds_share_their_samples(results: dict[str, Result]) -> None:
    keys = {result.outcomes["sample"].stage.key for result in results.values()}
    assert len(keys) == 1
    assert results["eagle"].outcomes["sample"].skipped


def test_kinds_race_side_by_side(
    results: dict[str, Result], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "BATCH_SIZES", (1, 2))
    monkeypatch.setattr(speed, "CHAIN_FROM", 1e9)  # however dear a column is on a busy machine
    found = bench.bench_kinds([recipe_of(kind) for kind in DRAFTS], runs, quiet)
    modes = ("fixed", "stops early", "tree")
    assert [(row["kind"], row["mode"], row["batch_size"]) for row in found["rows"]] == [
        (kind, mode, size)
        for size in (1, 2)
        for kind, mode in [(kind, mode) for kind in DRAFTS for mode in modes] + [("n-gram", "fixed")]
    ]
    for row in found["rows"]:
        assert row["speedup"]["low"] <= row["speedup"]["mean"] <= row["speedup"]["high"]
        assert (row["kind"] == "n-gram") == (row["training_minutes"] == 0)
    medusa, eagle = found["rows"][0], found["rows"][3]
    assert medusa["cost_ratio"] < 0.01 * medusa["first_cost_ratio"]  # all its drafts come at once
    assert eagle["cost_ratio"] > 0.05 * eagle["first_cost_ratio"]
    page = report(found)
    assert page.count("| n-gram |") == 2 and "Batch 2" in page
    assert (
        page.count("| tree of up to 2 levels, ") == 4
        and page.count("- smoke (eagle): ") == page.count("- smoke (medusa): ") == 2
    )


def test_only_trained_drafters_on_the_same_samples_race(results: dict[str, Result], runs: Path) -> None:
    with pytest.raises(UserError, match="no trained drafter"):
        bench.bench_kinds([recipe_of("medusa"), recipe_of("model")], runs, quiet)

    def trained(name: str, token: int, signals: str = "hidden", target: str = "t") -> Any:
        """A run whose one sample ends with `token`, in shards that hold `signals` too."""
        folder = runs / "shards" / f"{name}-{token}-{signals}"
        folder.mkdir(parents=True, exist_ok=True)
        ids, mask = [1, 2, token], [False, False, True]
        record = SampleRecord("p", "json", "t", "train", True, 0, 0.0, 1, ids, mask, "length")
        told = Signals(torch.ones(1, 4), torch.ones(1), torch.tensor([token]))
        write_shard(folder, 0, [record], None if signals == "none" else [told])
        stage = SimpleNamespace(manifest=lambda: {"files": {}}, outside={"target": target})
        recipe = SimpleNamespace(
            name=name, draft=SimpleNamespace(kind="model"), serving=recipe_of("medusa").serving
        )
        stages = {"train": stage, "sample": stage}
        return SimpleNamespace(recipe=recipe, stages=stages, samples=open_samples(folder))

    bench.check_comparable([trained("a", 1), trained("b", 1)])
    bench.check_comparable([trained("a", 1), trained("b", 1, signals="none")])
    for other in (trained("b", 2), trained("b", 1, target="u")):
        with pytest.raises(UserError, match=r"a \(model\) and b \(model\) differ in their samples"):
            bench.check_comparable([trained("a", 1), other])
    with pytest.raises(UserError, match=r"two of the recipes are called a \(model\)"):
        bench.check_comparable([trained("a", 1), trained("a", 2)])


def test_a_public_checkpoint_says_whose_it_is(results: dict[str, Result]) -> None:
    exported = results["eagle"].outcomes["export"].stage.directory / "eagle"
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    manifest = json.loads((exported / "manifest.json").read_text())
    assert manifest["kind"] == "eagle" and manifest["facts"]["recipe"] == "smoke"


# What a recipe may say.


@pytest.mark.parametrize(
    ("changes", "path", "says"),
    [
        (["draft={kind: medusa}"], "draft.heads", "kind medusa needs it"),
        (["draft={kind: eagle}"], "draft.rollout_steps", "kind eagle needs it"),
        (["draft={kind: eagle, rollout_steps: 2, heads: 2}"], "draft.heads", "only kind medusa has it"),
        (["draft.rollout_steps=2"], "draft.rollout_steps", "only kind eagle has it, and this is kind model"),
        (["draft.shared_head=true"], "draft.shared_head", "only kind medusa"),
        (["draft.kind=medusa", "draft.heads=8"], "draft.init", "leave init out"),
        (["draft={kind: medusa, heads: 2}"], "evaluate.num_speculative_tokens", "draft.heads is 2"),
        (["draft={kind: medusa, heads: 4}"], "export.formats", "exported as medusa, not as hf"),
        (
            ["export.formats=[eagle]"],
            "export.formats",
            "hf or gguf or openvino or onnx or compact",
        ),
        (["draft={kind: medusa, heads: 4}", "train.packing=true"], "train.packing", "not for medusa heads"),
        (["draft={kind: eagle, rollout_steps: 2}", "train.signal=topk"], "train.signal", "hidden or live"),
        (["draft.kind=medussa"], "draft.kind", "did you mean medusa"),
    ],
)
def test_what_does_not_fit_a_kind_is_said(changes: list[str], path: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("smoke", changes)
    (problem,) = [problem for problem in caught.value.problems if problem.path == path]
    assert says in str(problem)


def test_a_models_settings_decide_its_key_as_before_there_were_kinds() -> None:
    draft = load_recipe("smoke").draft
    assert set(draft.identity()) == {"kind", "init", "vocab_size", "revision"}
    assert "heads" in recipe_of("medusa").draft.identity()
    assert "rollout_steps" in recipe_of("eagle").draft.identity()
