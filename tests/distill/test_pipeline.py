"""The pipeline: which stages a command runs; and the whole of it, for real, on tiny models."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from data.errors import UserError
from distill import pipeline
from distill.context import Run
from distill.pipeline import NEEDS, WORK, Result, run
from distill.recipe import Recipe, load_recipe
from distill.stages import Stage, recipe_lock

SMALL = [
    "sample.tokens=600",
    "train.tokens=800",
    "evaluate.prompts=2",
    "evaluate.max_new_tokens=6",
    "data.prompts=[{source: builtin:structured, count: 120}]",
]
PAYLOAD = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
"""What an export holds beside timings, dates and the machine."""
ROOT = Path(__file__).resolve().parent.parent.parent


def quiet(text: str) -> None:
    pass


def digests(result: Result, name: str) -> dict[str, str]:
    manifest = result.outcomes[name].stage.manifest()
    assert manifest is not None
    return {file: entry["sha256"] for file, entry in manifest["files"].items()}


# Which stages run, with stages that do next to nothing.


class Child:
    """A tracker that tracks nothing."""

    run_id = ""

    @contextmanager
    def stage(self, name: str) -> Any:
        yield self


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Replaces every stage's work by one that notes its name and writes a file."""
    made: list[str] = []

    def note(name: str) -> Callable[[Run, Path, Any], None]:
        def work(run: Run, folder: Path, tracker: Any) -> None:
            made.append(name)
            (folder / "out.json").write_text("{}")

        return work

    def stages(self: Run) -> dict[str, Stage]:
        found: dict[str, Stage] = {}
        for name in NEEDS["run"]:
            before = [other for other in found if other != "select"]
            found[name] = Stage(
                name, self.runs_dir / "smoke", {}, {}, tuple(found[other] for other in before)
            )
        return found

    monkeypatch.setattr(pipeline, "WORK", {name: note(name) for name in WORK})
    monkeypatch.setattr(Run, "stages", property(stages))
    monkeypatch.setattr(Run, "tracker", Child())
    monkeypatch.setattr(pipeline, "_quiet_libraries", lambda: None)
    monkeypatch.setattr(pipeline, "system_metrics", lambda *_: nullcontext())
    return made


def go(tmp_path: Path, command: str, fresh: bool = False) -> Result:
    return run(load_recipe("smoke"), tmp_path, command, fresh=fresh, say=quiet)


def test_each_command_runs_what_it_needs_and_nothing_twice(calls: list[str], tmp_path: Path) -> None:
    go(tmp_path, "train")
    assert calls == ["sample", "train"]
    go(tmp_path, "sample")
    assert calls == ["sample", "train"]
    result = go(tmp_path, "export")
    assert calls == ["sample", "train", "evaluate", "select", "export"]
    assert [outcome.skipped for outcome in result.outcomes.values()] == [True, True, False, False, False]
    go(tmp_path, "run")
    assert calls[5:] == []
    assert "seed: 1" in (tmp_path / "smoke" / "recipe.yaml").read_text()


def test_fresh_begins_the_stage_of_the_command_again(calls: list[str], tmp_path: Path) -> None:
    go(tmp_path, "run")
    calls.clear()
    go(tmp_path, "train", fresh=True)
    assert calls == ["train"]
    calls.clear()
    go(tmp_path, "run", fresh=True)
    assert calls == list(NEEDS["run"])


def test_two_runs_of_a_recipe_do_not_meet(calls: list[str], tmp_path: Path) -> None:
    with recipe_lock(tmp_path / "smoke"), pytest.raises(UserError, match="already running"):
        go(tmp_path, "sample")
    assert calls == []


def test_result_as_json(calls: list[str], tmp_path: Path) -> None:
    answer = go(tmp_path, "train").to_json()
    assert [stage["name"] for stage in answer["stages"]] == ["sample", "train"]
    assert answer["evaluation"] is None
    assert json.loads(json.dumps(answer)) == answer


# Keys.


def keys(tmp_path: Path, *overrides: str) -> dict[str, str]:
    with ExitStack() as stack:
        stages = Run(load_recipe("smoke", overrides), tmp_path, quiet, stack).stages
    return {name: stage.key for name, stage in stages.items()}


def test_where_the_target_is_asked_live_the_loss_has_the_temperature_it_is_served_at(tmp_path: Path) -> None:
    live = ("train.signal=live", "sample.temperature=[0.0, 0.7, 1.0]")
    hot, warm = (keys(tmp_path, *live, f"serving.temperature={heat}") for heat in (1.0, 0.7))
    assert hot["sample"] == warm["sample"] and hot["train"] != warm["train"]


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("seed=9", set()),
        ("target.model=random:2", set()),
        ("data.prompts=[builtin:open]", set()),
        ("sample.max_new_tokens=17", set()),
        ("train.signal=live", set()),  # then sampling keeps no hidden states
        ("train.learning_rate=2e-3", {"sample"}),
        ("draft.init.layers=[0, 2]", {"sample"}),
        ("evaluate.num_speculative_tokens=[3]", {"sample", "train"}),
        ("serving.draft_sampling=sampled", {"sample", "train"}),
        ("description=another", {"sample", "train", "evaluate", "select", "export"}),
    ],
)
def test_a_setting_changes_the_keys_of_what_depends_on_it(
    tmp_path: Path, override: str, same: set[str]
) -> None:
    before, after = keys(tmp_path), keys(tmp_path, override)
    assert {name for name in before if before[name] == after[name]} == same


# For real.


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("smoke", SMALL)


@pytest.fixture(scope="module")
def straight(runs: Path, recipe: Recipe) -> Result:
    """The smoke recipe, smaller still, run once from end to end."""
    return run(recipe, runs, "run", fresh=False, say=quiet)


def test_everything_is_measured_registered_and_exported(straight: Result, runs: Path) -> None:
    from transformers import AutoModelForCausalLM

    from distill.candidates import resolve_candidate
    from evaluation.registry import candidates
    from evaluation.store import tracking_uri

    assert list(straight.outcomes) == list(NEEDS["run"])
    evaluation, selection = (
        straight.read("evaluate", "evaluation.json"),
        straight.read("select", "selection.json"),
    )
    assert evaluation is not None and selection is not None
    assert {"acceptance", "acceptance_before", "decode", "cost", "plain", "best"} <= set(evaluation)
    assert all(row["identical_outputs"] + row["near_ties"] == row["prompts"] for row in evaluation["decode"])
    assert selection["promoted"]
    (row,) = candidates(tracking_uri(runs))
    assert row.champion and row.recipe == "smoke" and row.loss == "forward_kl"
    drafter = straight.outcomes["train"].stage.directory / "drafter" / "model.safetensors"
    assert (
        resolve_candidate("models:/smoke@champion", runs) / drafter.name
    ).read_bytes() == drafter.read_bytes()
    exported = AutoModelForCausalLM.from_pretrained(straight.outcomes["export"].stage.directory / "hf")
    assert exported.config.num_hidden_layers == 2
    page = straight.outcomes["evaluate"].stage.directory / "report.html"
    assert evaluation["best"]["verdict"].split(":")[0] in page.read_text()
    stored = resolve_candidate("models:/smoke@champion", runs) / "evaluation"
    assert {path.name for path in stored.iterdir()} == {
        "evaluation.json", "certificate.json", "report.html"
    }  # fmt: skip
    assert json.loads((stored / "certificate.json").read_text())["holds"]
    verified = straight.read("export", "verification.json")
    assert verified is not None and verified["identical"] == verified["prompts"]


def test_promotion_measures_both_and_moves_only_the_faster(
    straight: Result, runs: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill.promote import promote
    from evaluation.store import open_client, tracking_uri

    with pytest.raises(UserError, match="champion already"):
        promote("models:/smoke@champion", runs, quiet)
    with pytest.raises(UserError, match="no candidate"):
        promote("models:/smoke/99", runs, quiet)
    longer = recipe.model_copy(update={"train": recipe.train.model_copy(update={"tokens": 900})})
    other = run(longer, runs, "select", fresh=False, say=quiet).read("select", "selection.json")
    assert other is not None
    client = open_client(tracking_uri(runs))

    def champion() -> str:
        return str(client.get_model_version_by_alias("smoke", "champion").version)

    challenger = next(version for version in ("1", "2") if version != champion())
    for verdict, moved in (((False, "It includes zero."), False), ((True, "It lies above zero."), True)):
        monkeypatch.setattr("evaluation.duel.judge", lambda measured, version, verdict=verdict: verdict)
        decision = promote(f"models:/smoke/{challenger}", runs, quiet)
        assert (decision.promoted, decision.reason) == verdict and (champion() == challenger) is moved
        assert {"challenger", "champion", "difference"} <= set(decision.measured)
        assert decision.measured["challenger"]["bugs"] == 0
    (done,) = [
        run_ for run_ in client.search_runs(
            [e.experiment_id for e in client.search_experiments()], "tags.stage = 'promote'"
        ) if run_.data.metrics.get("promote/moved") == 1.0
    ]  # fmt: skip
    assert [file.path for file in client.list_artifacts(done.info.run_id)] == ["promotion.json"]


def test_without_a_certificate_nothing_is_measured_or_moved(
    straight: Result, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from distill import promote as module
    from evaluation import registry

    read = registry.candidates
    monkeypatch.setattr(
        registry, "candidates",
        lambda uri: [replace(row, lossless=None, champion=False) for row in read(uri)],
    )  # fmt: skip
    monkeypatch.setattr(module, "measure", lambda *_: pytest.fail("measured without a certificate"))
    decision = module.promote("models:/smoke/1", runs, quiet)
    assert not decision.promoted and "certificate" in decision.reason


def test_the_same_command_again_does_nothing(straight: Result, runs: Path, recipe: Recipe) -> None:
    again = run(recipe, runs, "run", fresh=False, say=quiet)
    assert all(outcome.skipped for outcome in again.outcomes.values())
    assert again.read("select", "selection.json") == straight.read("select", "selection.json")


def test_an_export_made_again_has_the_same_payload(straight: Result, runs: Path, recipe: Recipe) -> None:
    before = digests(straight, "export")
    again = digests(run(recipe, runs, "export", fresh=True, say=quiet), "export")
    payload = {name for name in before if Path(name).name in PAYLOAD}
    assert len(payload) == len(PAYLOAD)
    assert {name: again[name] for name in payload} == {name: before[name] for name in payload}


def test_damaged_outputs_come_back_bit_for_bit(straight: Result, runs: Path, recipe: Recipe) -> None:
    stage = straight.outcomes["sample"].stage
    before = digests(straight, "sample")
    (stage.directory / "signals-00001.safetensors").write_bytes(b"rubbish")
    (stage.directory / "samples-00002.parquet").unlink()
    said: list[str] = []
    mended = run(recipe, runs, "sample", fresh=False, say=said.append)
    assert any("signals-00001" in text and "samples-00002" in text for text in said)
    assert digests(mended, "sample") == before


@pytest.mark.slow
def test_two_fresh_processes_write_the_same_payload(tmp_path: Path) -> None:
    """Of sample, train and export; each with a hash seed, and so an order of sets, of its own."""
    payloads = []
    for seed in ("1", "2"):
        runs = tmp_path / seed
        one = "evaluate.num_speculative_tokens=[2]"  # of several the export has the one that measured fastest
        settings = [word for text in [*SMALL, one] for word in ("--set", text)]
        outside = {**os.environ, "DISTILL_RUNS": str(runs), "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "distill.cli", "run", "smoke", *settings]
        subprocess.run(words, cwd=ROOT, env=outside, capture_output=True, check=True)
        payloads.append(
            {
                f"{stage}/{name}": entry["sha256"]
                for stage in ("sample", "train", "export")
                for path in runs.glob(f"smoke/{stage}-*/manifest.json")
                for name, entry in json.loads(path.read_text())["files"].items()
                if stage == "sample" or Path(name).name in PAYLOAD
            }
        )
    assert payloads[0] == payloads[1]
    names = {Path(name).name for name in payloads[0]}
    assert names >= {*PAYLOAD, "samples-00000.parquet", "signals-00000.safetensors"}


def test_an_interrupted_run_ends_with_the_same_bits(
    straight: Result, tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill.progress import Progress

    advance = Progress.advance
    heard = 0

    def interrupting(self: Progress, count: int, note: str = "") -> None:
        nonlocal heard
        heard += 1
        if heard in (30, 90):
            raise KeyboardInterrupt
        advance(self, count, note)

    monkeypatch.setattr(Progress, "advance", interrupting)
    interrupts = 0
    while True:
        try:
            result = run(recipe, tmp_path, "train", fresh=False, say=quiet)
            break
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 2
    for name in ("sample", "train"):
        assert digests(result, name) == digests(straight, name)


def test_the_llama_recipe_with_tiny_models_in_their_place(
    tmp_path: Path, tiny_pair: tuple[Path, Path]
) -> None:
    target, family = tiny_pair
    small = [
        f"target.model={target}",
        "target.revision=null",
        f"draft.init.from={family}",
        "draft.revision=null",
        "data.prompts=[{source: builtin:open, count: 120}]",
        "data.splits={select: 0.2, test: 0.2}",
        "sample.tokens=400",
        "sample.max_new_tokens=8",
        "train.tokens=400",
        "evaluate={prompts: 2, num_speculative_tokens: [3], max_new_tokens: 6}",
    ]
    result = run(load_recipe("llama-1b", small), tmp_path, "run", fresh=False, say=quiet)
    evaluation = result.read("evaluate", "evaluation.json")
    assert evaluation is not None and evaluation["best"]["num_speculative_tokens"] == 3
    assert (result.outcomes["export"].stage.directory / "hf" / "model.safetensors").exists()


def test_live_signals_keep_no_hidden_states(tmp_path: Path) -> None:
    small = [
        "train.signal=live",
        "sample.tokens=400",
        "train.tokens=400",
        "evaluate={prompts: 2, num_speculative_tokens: [3], max_new_tokens: 6}",
    ]
    result = run(load_recipe("smoke", small), tmp_path, "evaluate", fresh=False, say=quiet)
    assert not list(result.outcomes["sample"].stage.directory.glob("signals-*"))
    evaluation = result.read("evaluate", "evaluation.json")
    assert evaluation is not None
    assert {row["split"] for row in evaluation["acceptance"]} == {"seen", "unseen"}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("draft.init.layers=[0, 99]", "layer 99"),
        ("draft.vocab_size=1000000", "draft.vocab_size"),
        ("data.max_prompt_tokens=1000000", "positions"),
    ],
)
def test_what_the_models_do_not_have_is_refused_before_sampling(
    tmp_path: Path, override: str, named: str
) -> None:
    with pytest.raises(UserError, match=named):
        run(load_recipe("smoke", [override]), tmp_path, "run", fresh=False, say=quiet)
    assert not list(tmp_path.glob("smoke/sample-*"))
