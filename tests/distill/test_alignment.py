"""The bench of alignment on the tiny recipe: equal arms agree, and a stopped bench goes on."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.errors import UserError
from data.records import Samples, open_samples
from distill import cli
from distill.bench import alignment
from distill.bench.alignment import ARMS, bench, sample_rows, target_calls
from distill.bench.alignment_report import report
from distill.context import Run
from distill.models import load_drafter
from distill.recipe import load_recipe
from evaluation.acceptance import AcceptanceTable
from evaluation.replay import replay

TOKENS = 150
SETS = ["evaluate.prompts=3", "sample.max_new_tokens=8", "train.learning_rate=3e-3"]
CHOSEN = ["start", "ngram", "forward_kl", "full_vocabulary", "gkd"]


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All arms, after a first attempt that died while the second trained arm was trained."""
    runs_dir = tmp_path_factory.mktemp("runs")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)

    with pytest.MonkeyPatch.context() as patch:
        original = alignment._train

        def dying(drafter: Any, run: Any, seed: int, scratch: Path) -> None:
            if "full_vocabulary" in scratch.name:
                raise Killed
            original(drafter, run, seed, scratch)

        patch.setattr(alignment, "_train", dying)
        with pytest.raises(Killed):
            bench("smoke", SETS, TOKENS, CHOSEN, runs_dir, say)
    done = {path.name: path.stat().st_mtime_ns for path in runs_dir.glob("smoke/alignment/*.json")}
    assert {name.split("-", 1)[0] for name in done} == {"start", "ngram", "forward_kl"}
    result = bench("smoke", SETS, TOKENS, CHOSEN, runs_dir, say)
    kept = {path.name: path.stat().st_mtime_ns for path in runs_dir.glob("smoke/alignment/*")}
    assert len(kept) == len(CHOSEN)  # and no scratch
    assert done.items() <= kept.items()
    assert [text for text in said if "forward_kl" in text] == ["bench alignment: forward_kl, seed 1"]
    return result


def test_every_arm_is_measured_on_the_same_tokens(found: dict[str, Any]) -> None:
    assert list(found["arms"]) == CHOSEN and found["tokens"] == TOKENS
    shapes = [
        [(row["task"], row["seen"], row["temperature"], row["tokens"]) for row in arm["samples"]]
        for arm in found["arms"].values()
    ]
    assert all(shape == shapes[0] for shape in shapes)
    assert sum(row[3] for row in shapes[0]) == found["test_tokens"]
    for arm in found["arms"].values():
        for row in arm["samples"]:
            assert 0 <= row["greedy"] <= row["tokens"] and 0 <= row["sampled"] <= row["tokens"]
            assert (row["tokens"] - 1) / 9 <= row["calls_8"] <= row["calls_4"] <= row["tokens"]


def test_trls_gkd_agrees_with_forward_kl(found: dict[str, Any]) -> None:
    """Off-policy at beta 0, over the whole vocabulary: the same sums from another trainer's step."""
    ours, theirs, start = (found["arms"][arm]["samples"] for arm in ("full_vocabulary", "gkd", "start"))
    for one, other in zip(ours, theirs, strict=True):
        assert one["sampled"] == pytest.approx(other["sampled"], rel=1e-3)
    moved = [abs(one["sampled"] - other["sampled"]) for one, other in zip(ours, start, strict=True)]
    assert max(moved) > 0.01  # training did something that the two could disagree about


def test_the_page(found: dict[str, Any]) -> None:
    text = report(found, "distill bench alignment smoke")
    lines = text.splitlines()
    assert "`distill bench alignment smoke` on" in text and "150 tokens trained per arm" in text
    for arm in CHOSEN:
        assert sum(line.startswith(f"| {arm} |") for line in lines) == 2  # in all, and by task
    own = next(line for line in lines if line.startswith("| forward_kl |"))
    assert "+0.000 [+0.000, +0.000]" in own
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert len(set(tables)) == 2
    without = {**found, "arms": {"start": found["arms"]["start"]}}
    assert "greedy - forward_kl" not in report(without, "x")
    json.dumps(found)


def test_unknown_arms_and_settings_are_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no arm 'forward_lk'"):
        bench("smoke", [], TOKENS, ["forward_lk"], tmp_path, str)
    with pytest.raises(UserError, match="own shape"):
        bench("smollm2-135m", [], TOKENS, ["layers_2"], tmp_path, str)
    assert list(tmp_path.iterdir()) == []


def test_seeds_change_training_and_nothing_else(tmp_path: Path) -> None:
    arms = ["start", "forward_kl", "tvd"]
    found = bench("smoke", SETS, TOKENS, arms, tmp_path, str, seeds=[1, 2])
    names = ["start", "forward_kl, seed 1", "tvd, seed 1", "forward_kl, seed 2", "tvd, seed 2"]
    assert list(found["arms"]) == names
    sampled = {name: [row["sampled"] for row in arm["samples"]] for name, arm in found["arms"].items()}
    assert len({str(rows) for rows in sampled.values()}) == len(names)
    assert len(list(tmp_path.glob("smoke/sample-*"))) == 1
    rows = [line for line in report(found, "x").splitlines() if line.startswith("| forward_kl, seed")]
    assert all("+0.000 [+0.000, +0.000]" in row for row in rows[:2])  # each seed has its own baseline


def test_a_race_decodes_with_the_drafters_that_were_measured(tmp_path: Path) -> None:
    arms = ["ngram", "forward_kl", "full_vocabulary"]
    plain = bench("smoke", SETS, TOKENS, arms, tmp_path, str)
    assert plain["race"] == {} and not list(tmp_path.glob("smoke/alignment/*-drafter"))
    said: list[str] = []
    found = bench("smoke", SETS, TOKENS, arms, tmp_path, said.append, race=True)
    trained = arms[1:]
    for arm in trained:  # again, for their drafters were not kept; and to the same end
        one, other = (found_["arms"][arm]["samples"] for found_ in (plain, found))
        assert one == other
    kept = {path.name.split("-")[0]: path for path in tmp_path.glob("smoke/alignment/*-drafter")}
    assert sorted(kept) == trained
    with ExitStack() as stack:  # what is raced accepts what was measured, and the start of it does not
        run = Run(load_recipe("smoke", SETS), tmp_path, str, stack)
        run.samples = open_samples(next(tmp_path.glob("smoke/sample-*")))
        test = run.samples.where(split="test")
        measured = found["arms"]["forward_kl"]["samples"]
        for drafter, same in (
            (load_drafter(kept["forward_kl"], "cpu"), True),
            (run.initial_drafter(), False),
        ):
            rows = alignment.sample_rows(alignment._table(drafter, run, test), test)
            assert (rows == measured) is same
    rows = found["race"]["rows"]
    assert {row["drafter"] for row in rows} == {*trained, None}
    for row in rows:
        assert row["speedup"]["low"] <= row["speedup"]["mean"] <= row["speedup"]["high"]
    assert {row["num_speculative_tokens"] for row in rows if row["mode"] == "fixed"} == {4, 8}
    text = report(found, "x")
    assert f"Decoding {found['race']['prompts']} test prompts" in text and "Batch 1, plain decoding" in text
    said.clear()
    bench("smoke", SETS, TOKENS, arms, tmp_path, said.append, race=True)
    assert not [line for line in said if line.startswith("bench alignment: f")]  # measured, and kept


def test_what_cannot_be_raced_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--race measures trained arms, and start, ngram are none"):
        bench("smoke", SETS, TOKENS, ["start", "ngram"], tmp_path, str, race=True)
    with pytest.raises(UserError, match="trains heads"):
        bench("smollm2-135m-medusa", [], TOKENS, ["forward_kl"], tmp_path, str)
    assert list(tmp_path.iterdir()) == []


def test_a_serving_mode_has_results_of_its_own(tmp_path: Path) -> None:
    for size in (1, 2, 1):
        bench(
            "smoke",
            [*SETS, "evaluate.prompts=10", f"serving.batch_size={size}"],
            TOKENS,
            ["start"],
            tmp_path,
            str,
        )
    assert len(list(tmp_path.glob("smoke/alignment/start-*.json"))) == 2


def test_the_page_of_texts_that_are_all_drawn(found: dict[str, Any]) -> None:
    """Nothing was sampled at temperature 0, so nothing is said about it."""
    drawn = {
        name: {**arm, "samples": [row for row in arm["samples"] if row["temperature"] > 0]}
        for name, arm in found["arms"].items()
    }
    rows = [line for line in report({**found, "arms": drawn}, "x").splitlines() if "| forward_kl |" in line]
    assert rows[0].startswith("| forward_kl | - | - |")


@pytest.mark.parametrize("option", [["--arms", "tvd"], ["--seeds", "1,2"], ["--race"]])
def test_the_decoders_bench_takes_no_arms(option: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "decoder", *option]) == 2
    assert "for `distill bench alignment`" in capfd.readouterr().err


@pytest.mark.parametrize("seeds", ["", "1,", "a", "1,1", "-1", "1.5", "9999999999"])
def test_seeds_that_are_none(seeds: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "alignment", "smoke", "--seeds", seeds]) == 2
    assert "give different whole numbers" in capfd.readouterr().err


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_recipe_of_its_own(arm: str) -> None:
    recipe = load_recipe("smollm2-135m-open", ARMS[arm])
    assert recipe.draft.init.layers is None or recipe.draft.init.layer_count is None


# --- target calls ---


def enumerated(accepted: list[float], count: int) -> float:
    """The same by following every outcome of every round."""

    def calls(place: int) -> float:
        if place >= len(accepted):
            return 0.0
        total, reach = 1.0, 1.0
        for ahead in range(count + 1):
            chance = accepted[place + ahead] if ahead < count and place + ahead < len(accepted) else 0.0
            total += reach * (1 - chance) * calls(place + ahead + 1)
            reach *= chance
        return total

    return calls(1)


def test_target_calls_against_enumeration_and_replay() -> None:
    accepted = [0.3, 0.9, 0.2, 1.0, 0.0, 0.7, 0.5]
    for count in (1, 2, 4):
        assert target_calls(accepted, count) == pytest.approx(enumerated(accepted, count))
    assert target_calls([0.0] * 6, 4) == 5 and target_calls([1.0] * 11, 4) == 2
    matches = "0110111100101111101"
    rounds = replay([matches], 3)  # without the last one
    assert target_calls([float(bit) for bit in matches], 3) == len(rounds) + 1


def test_sample_rows_use_the_acceptance_of_the_temperature(
    make_samples: Callable[..., Samples],
) -> None:
    from dataclasses import replace

    samples = make_samples(4)
    warm = Samples([replace(samples[0], temperature=1.0), samples[1]], None)
    sizes = [record.completion_tokens for record in warm]

    def column(value: float) -> Tensor:
        return torch.full((sum(sizes),), value)

    owner = torch.repeat_interleave(torch.arange(2), torch.tensor(sizes)).flip(0)  # in any order
    table = AcceptanceTable(column(0.5), column(0.25), column(1.0), owner)
    first, second = sample_rows(table, warm)
    assert (first["tokens"], second["tokens"]) == tuple(sizes)
    assert first["argmax"] == pytest.approx(0.25 * sizes[0])
    assert first["calls_4"] == pytest.approx(target_calls([0.5] * sizes[0], 4))
    assert second["calls_4"] == pytest.approx(target_calls([1.0] * sizes[1], 4))
