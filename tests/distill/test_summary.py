"""The closing summary says what was gained, and below 1x that one should not speculate, and why."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data.files import write_json
from distill.recipe import load_recipe
from distill.result import Result
from distill.stages import Stage, run_stage
from distill.summary import advice, export_lines, print_summary
from evaluation.verdict import verdict, why


def interval(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}


def decode(drafter: str, split: str, speedup: float) -> dict[str, Any]:
    return {
        "drafter": drafter,
        "split": split,
        "num_speculative_tokens": 4,
        "prompts": 30,
        "tokens_per_target_call": interval(3.2),
        "acceptance_rate": 0.6,
        "identical_outputs": 29,
        "near_ties": 1,
        "tokens_per_second": 20.0 * speedup,
        "plain_tokens_per_second": 20.0,
        "speedup": interval(speedup),
        "predicted_speedup": None if drafter == "ngram" else speedup + 0.05,
    }


def evaluation(seen: float = 2.1, unseen: float = 1.9, ngram: float = 1.1) -> dict[str, Any]:
    def acceptance(shift: float) -> list[dict[str, Any]]:
        measures = {name: interval(0.8 - shift) for name in ("sampled", "argmax", "greedy")}
        rows = [
            {"split": "seen", "task": "all", "temperature": 0.0, "tokens": 1234, "samples": 40, **measures}
        ]
        return [*rows, {**rows[0], "task": "json"}]

    made = {
        "machine": {"cpu": "Good CPU", "cores": 2},
        "serving": {"temperature": 0.0, "batch_size": 1},
        "acceptance": acceptance(0.0),
        "acceptance_before": acceptance(0.7),
        "decode": [
            decode("model", "seen", seen),
            decode("ngram", "seen", ngram),
            decode("model", "unseen", unseen),
        ],
        "cost": {"cost_ratio": 0.25, "verify_overhead": {"4": 0.3}, "target_step_ms": 50.0},
        "best": {
            "drafter": "model",
            "num_speculative_tokens": 4,
            "split": "seen",
            "speedup": interval(seen),
            "predicted_speedup_at_cost_ratio": {"0.05": 2.5, "0.4": 0.9},
        },
    }
    made["best"]["verdict"] = verdict(made)
    return made


@pytest.mark.parametrize(
    ("measures", "words"),
    [
        ({}, "serve the export"),
        ({"unseen": 0.7}, "never seen reach 0.70x only"),
        ({"ngram": 2.5}, "n-gram look-up is faster"),
        ({"seen": 0.8, "ngram": 0.9}, "fewer drafter layers"),
        ({"seen": 1.0, "ngram": 1.05}, "fewer drafter layers"),  # its interval holds 1: no gain either
    ],
)
def test_advice_follows_the_measures(measures: dict[str, float], words: str) -> None:
    assert words in advice(evaluation(**measures))


def result(folder: Path, *stages: str, changes: Sequence[str] = (), **measures: float) -> Result:
    made = Result(load_recipe("smoke", changes), 66.0)
    files = {
        "evaluate": ("evaluation.json", evaluation(**measures)),
        "select": (
            "selection.json",
            {"name": "[bold]x", "version": "3", "promoted": True, "reason": "first [/] one"},
        ),
        "export": ("verification.json", {"prompts": 3, "identical": 3, "tokens": 90, "target_calls": 30}),
    }
    for name in stages:
        file, content = files.get(name, ("x.json", {}))
        stage = Stage(name, folder, {}, {})
        made.outcomes[name] = run_stage(
            stage,
            lambda at, file=file, content=content: write_json(at / file, content),
            fresh=False,
            say=print,
        )
    return made


def test_whole_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(result(tmp_path, "sample", "train", "evaluate", "select", "export"))
    out = capsys.readouterr().out
    for words in (
        "1.10",  # minutes of preparation
        "0.100 -> 0.800",
        "2.10 [2.00, 2.20]",
        "2.15",
        "[bold]x version 3 is now champion: first [/] one",
        "3 of 3 outputs equal plain decoding, 3.00 tokens per target call",
        "Next: serve",
    ):
        assert words in out
    assert "where a draft step costs" not in " ".join(out.split())
    assert "json" not in out  # rows of single tasks stay in evaluation.json


def test_summary_below_one_shows_other_cost_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_summary(result(tmp_path, "sample", "train", "evaluate", seen=0.8))
    out = " ".join(capsys.readouterr().out.split())
    assert "Do not speculate on this machine" in out
    assert "5% 2.50x" in out and "40% 0.90x" in out and "25% (this machine) 0.85x" in out


def test_summary_of_a_part_names_the_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = result(tmp_path, "sample")
    print_summary(made)
    assert "Next: distill evaluate, with the same recipe" in capsys.readouterr().out
    assert json.loads(json.dumps(made.to_json()))["evaluation"] is None


@pytest.mark.parametrize(
    ("changes", "folders", "served"),
    [
        ([], ["hf"], 1),
        ([], ["hf"], 0),
        (["export.formats=[gguf,compact]"], ["gguf", "compact"], 1),
        (["draft={kind: medusa, heads: 4}", "export.formats=[medusa]"], ["medusa"], 0),
    ],
)
def test_the_summary_names_the_folders_that_the_export_wrote(
    changes: list[str], folders: list[str], served: int, tmp_path: Path
) -> None:
    made = result(tmp_path, "evaluate", "export", changes=changes)
    for folder in folders[:served]:
        script = made.outcomes["export"].stage.directory / folder / "serve" / "llama-cpp.sh"
        script.parent.mkdir(parents=True)
        script.touch()
    lines = export_lines(made)
    named = [line for line in lines if not line.startswith("  ")]
    directory = made.outcomes["export"].stage.directory
    assert [str(directory / folder) in line for folder, line in zip(folders, named, strict=True)] == [
        True for _ in folders
    ]
    assert sum("llama-cpp.sh" in line for line in lines) == served


def test_medusa_drafts_in_one_go_so_its_cost_is_that_of_a_round() -> None:
    made = evaluation(seen=0.8, ngram=0.9)
    made["kind"], made["cost"]["first_draft_step_ms"] = "medusa", 5.0
    assert "drafting costs 0.10 of a target step" in why(made)
    assert "layers" not in advice(made) and "draft.vocab_size" in advice(made)
