"""Engines by recipe, the whole sampling stage through them, on tiny models and a fake server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.endpoint import EndpointEngine
from data.errors import UserError
from data.records import SampleRecord, open_samples
from distill.pipeline import Result, run
from distill.preflight import check
from distill.recipe import RECIPES, RecipeError, load_recipe
from tests.data.fake_server import Fake, fake_server

SMALL = [
    "sample.tokens=120",
    "sample.max_new_tokens=8",
    "evaluate.prompts=2",
    "train.signal=live",
    "data.prompts=[{source: builtin:structured, count: 120}]",
]


def quiet(text: str) -> None:
    pass


def sample(runs: Path, *overrides: str) -> Result:
    return run(load_recipe("smoke", [*SMALL, *overrides]), runs, "sample", fresh=False, say=quiet)


def records(result: Result) -> list[SampleRecord]:
    return list(open_samples(result.outcomes["sample"].stage.directory))


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """Seven tokens made of the seed."""
    tokens = [10 + (body["seed"] >> shift) % 300 for shift in range(7)]
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 7}
    return {"choices": [{"token_ids": tokens, "finish_reason": "length"}], "usage": usage}


def to(fake: Fake) -> list[str]:
    return ["sample.engine=openai", f"sample.endpoint={{url: '{fake.url}', model: target}}"]


def test_a_recipe_samples_from_a_server_without_loading_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.context.load_target", lambda *_: pytest.fail("the target was loaded"))
    with fake_server(lambda body, times: (200, answer(body))) as fake:
        result = sample(tmp_path, *to(fake))
        found = records(result)
        assert {record.temperature for record in found} == {0.0, 1.0}
        for record in found:
            new = record.input_ids[-7:]
            assert new == [10 + (record.seed % 2**31 >> shift) % 300 for shift in range(7)]
        assert any("end at max_new_tokens" in note for note in result.outcomes["sample"].notes)
        # Interrupted and asked elsewhere: the same stage goes on with the shards that are there.
        first = result.outcomes["sample"].stage
        (first.directory / "manifest.json").unlink()
        (first.directory / "samples-00001.parquet").unlink()
        asked = len(fake.asked)
        with fake_server(lambda body, times: (200, answer(body))) as other:
            again = sample(tmp_path, *to(other))
        assert again.outcomes["sample"].stage.key == first.key and again.outcomes["sample"].resumed
        assert records(again) == found and 0 < len(other.asked) < asked


def test_recipes_share_their_samples_until_one_begins_afresh(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text((RECIPES / "smoke.yaml").read_text())
    said: list[str] = []

    def sample_other(fake: Fake, *overrides: str, fresh: bool = False) -> Result:
        recipe = load_recipe(str(other), [*SMALL, *to(fake), *overrides])
        return run(recipe, tmp_path, "sample", fresh=fresh, say=said.append)

    with fake_server(lambda body, times: (200, answer(body))) as fake:
        first = records(sample(tmp_path, *to(fake)))
        asked = len(fake.asked)
        assert records(sample_other(fake)) == first and len(fake.asked) == asked > 0
        assert any("shards taken over from finished samplings" in text for text in said)
        sample_other(fake, "evaluate.prompts=3")
        held_out = 3 + 2 * 3 + 2 * 3  # test prompts at both temperatures
        assert len(fake.asked) == asked + held_out
        assert records(sample_other(fake, fresh=True)) == first and len(fake.asked) == 2 * asked + held_out


def test_hidden_signals_from_an_engine_that_has_none_are_refused_before_any_work() -> None:
    for engine in ("openai", "batch", "vllm"):
        settings = [f"sample.engine={engine}"]
        if engine != "vllm":
            settings.append("sample.endpoint={model: m, url: 'http://127.0.0.1:1/v1'}")
        with pytest.raises(RecipeError, match=rf"engine {engine} tells tokens alone.*signal: live"):
            load_recipe("smoke", settings)
        load_recipe("smoke", [*settings, "train.signal=live"])


def test_a_key_in_a_recipe_is_refused() -> None:
    with pytest.raises(RecipeError, match="recipes hold no secrets"):
        load_recipe("smoke", ["sample.engine=openai", "sample.endpoint={model: m, api_key: k}"])


def test_batch_files_end_the_stage_with_exit_code_2_and_then_feed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from distill.cli import main

    monkeypatch.setenv("DISTILL_RUNS", str(tmp_path))
    words = ["sample", "smoke", "--json"]
    for override in (*SMALL, "sample.engine=batch", "sample.endpoint={model: target}"):
        words += ["--set", override]
    rounds = 0
    while (code := main(words)) == 2:
        rounds += 1
        assert "run the same command again" in json.loads(capsys.readouterr().out)["error"]
        (asked,) = tmp_path.glob(f"smoke/sample-*/batch/requests-{rounds}.jsonl")
        rows = [json.loads(line) for line in asked.read_text().splitlines()]
        lines = [
            {"custom_id": row["custom_id"], "response": {"status_code": 200, "body": answer(row["body"])}}
            for row in rows
        ]
        asked.with_name(f"answers-{rounds}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert code == 0 and rounds == 1
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    found = list(open_samples(Path(stage["directory"])))
    assert {len(record.input_ids) - record.completion_tokens for record in found} != {0}
    assert sum(record.completion_tokens for record in found if record.split == "train") >= 120
    with fake_server(lambda body, times: (200, answer(body))) as fake:
        served = records(sample(tmp_path / "served", *to(fake)))
    assert served == found, "the engines gave the same answers, so the samples must be the same"


def test_preflight_says_whether_the_server_answers(tmp_path: Path) -> None:
    with fake_server(lambda body, times: (200, {})) as fake:
        recipe = load_recipe("smoke", [*SMALL, *to(fake)])
        assert f"target at {fake.url}" in check(recipe, tmp_path).text()
    gone = check(recipe, tmp_path)
    assert "no server answers" in gone.text() and not gone.blocked
    with pytest.raises(UserError, match="no server answers"):
        run(recipe, tmp_path, "sample", fresh=False, say=quiet)


def test_the_engine_of_a_server_keeps_the_targets_own_end(tmp_path: Path) -> None:
    from contextlib import ExitStack

    from distill.context import Run
    from distill.engines import make_engine

    with fake_server(lambda body, times: (200, {})) as fake, ExitStack() as stack:
        shared = Run(load_recipe("smoke", [*SMALL, *to(fake)]), tmp_path, quiet, stack)
        engine = make_engine(shared, tmp_path)
        assert isinstance(engine, EndpointEngine)
        assert engine.reader.eos_ids == shared.target.eos_ids == (engine.reader.eos_id,)
        assert engine.reader.vocab_size == shared.target.model.config.vocab_size
        assert "<|im_end|>" == shared.tokenizer.decode([engine.reader.eos_id])
