"""The bench of sampling: engines take turns over the same prompts, and what parts is explained."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data.engines import Completion, SampleRequest
from data.errors import UserError
from distill.bench import sampling
from distill.bench.sampling import Passes, bench, ratios, report, take_turns, verdicts
from distill.bench.sampling_peers import GenerateEngine
from distill.recipe import load_recipe
from evaluation.decoder.sampler import BuiltinSampler
from tests.distill.conftest import EOS, VOCAB, tiny_llama

ROOT = Path(__file__).parents[2]
SMALL = ["data.prompts=[{source: builtin:structured, count: 60}]", "evaluate.prompts=2"]


def quiet(text: str) -> None:
    pass


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PROMPTS": 10, "BATCH": 4, "NEW_TOKENS": 6, "PASSES": 2, "OTHER_BATCH": 3, "COMPARED": 5
    }.items():  # fmt: skip
        monkeypatch.setattr(sampling, name, value)


def test_every_engine_answers_the_same_prompts_and_the_report_names_all(small: None, tmp_path: Path) -> None:
    found = bench(load_recipe("smoke", SMALL), tmp_path, quiet)
    assert found["prompts"] == 10
    for speeds in found["tokens_per_second"].values():
        assert {"builtin", "transformers", "transformers_static_cache"} <= speeds.keys()
        assert all(0 < each["low"] <= each["median"] <= each["high"] for each in speeds.values())
    assert found["ratios"].keys() == {"0", "1"}
    # Greedily, transformers and another batch width give the same tokens.
    same = {"identical_outputs": 10, "near_ties": 0, "bugs": 0}
    assert found["answers_of_generate"] == same
    assert found["other_width"] == {"batch_size": 3, **same, "identical_outputs": 5}
    text = report(found)
    assert "builtin_over_transformers: " in text and "10 the same, 0 part at a near tie" in text
    assert "vllm: not measured" in text and "no drafter is trained here" in text


def test_too_few_prompts_are_refused(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BATCH", 1000)
    with pytest.raises(UserError, match="a batch is 1000"):
        bench(load_recipe("smoke", SMALL), tmp_path, quiet)


REQUESTS = [SampleRequest([1, 5 + place, *[9] * (place % 4)], place) for place in range(7)]


def engine() -> BuiltinSampler:
    return BuiltinSampler(tiny_llama(0), eos_ids=[EOS], batch_size=4, max_length=40, signal_temperature=None)


def test_generate_keeps_the_order_and_ends_where_the_target_does() -> None:
    peer = GenerateEngine(tiny_llama(0), [EOS], 3)
    settings: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 8, "on_tokens": lambda count: None}
    ours, theirs = engine().sample(REQUESTS, **settings), peer.sample(REQUESTS, **settings)
    assert [each.tokens for each in ours] == [each.tokens for each in theirs if isinstance(each, Completion)]
    assert peer.completion([4, EOS, 0, 0]) == Completion([4, EOS], "stop", None)
    assert peer.completion([4, 5]) == Completion([4, 5], "length", None)
    drawn = peer.sample(REQUESTS, **{**settings, "temperature": 1.0})
    assert drawn != theirs


def test_an_answer_that_parts_for_no_reason_is_a_bug(small: None) -> None:
    made = engine()
    known = [
        each.tokens
        for each in made.sample(REQUESTS, temperature=0.0, max_new_tokens=6, on_tokens=lambda count: None)
    ]
    others = [list(tokens) for tokens in known]
    others[2][1] = (others[2][1] + 1) % VOCAB
    assert verdicts(made, REQUESTS, known, others) == {"identical_outputs": 6, "near_ties": 0, "bugs": 1}
    assert verdicts(made, REQUESTS[:3], known, others) == {
        "identical_outputs": 2, "near_ties": 0, "bugs": 1
    }  # fmt: skip


def test_turns_rotate_after_a_warm_up(small: None) -> None:
    order: list[tuple[str, int]] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def sample(self, requests: Any, *, temperature: float, max_new_tokens: int, on_tokens: Any) -> Any:
            order.append((self.name, max_new_tokens))
            return [Completion([1, 2, 3], "length", None) for _ in requests]

    found = take_turns({"a": Fake("a"), "b": Fake("b")}, REQUESTS, 0.0, quiet)
    assert order == [("a", 2), ("b", 2), ("a", 6), ("b", 6), ("b", 6), ("a", 6)]
    assert len(found["a"].seconds) == 2 and found["b"].answers == [[1, 2, 3]] * 7


def test_ratios_are_taken_pass_by_pass() -> None:
    ours, theirs = Passes([2.0, 4.0], [[1] * 8]), Passes([4.0, 12.0], [[1] * 4])
    assert ratios({"builtin": ours, "transformers": theirs})["builtin_over_transformers"] == {
        "median": 5.0, "low": 4.0, "high": 6.0
    }  # fmt: skip


@pytest.mark.slow
def test_several_processes_answer_as_one(tmp_path: Path) -> None:
    program = f"""
import torch
from pathlib import Path
from data.engines import SampleRequest
from distill.bench.sampling_peers import ProcessesEngine
from distill.models import load_model
from evaluation.decoder.sampler import BuiltinSampler

if __name__ == "__main__":
    torch.set_num_threads(1)
    requests = [SampleRequest([1, 5 + place, *[9] * (place % 4)], place) for place in range(7)]
    settings = dict(eos_ids=[2], batch_size=4, max_length=40, signal_temperature=1.0)
    folder = Path({str(tmp_path / "model")!r})
    one = BuiltinSampler(load_model(folder, torch.float32), **settings)
    with ProcessesEngine(2, folder, "float32", settings) as several:
        for temperature in (0.0, 1.0):
            asked = dict(temperature=temperature, max_new_tokens=8, on_tokens=print)
            ours = [each.tokens for each in one.sample(requests, **asked)]
            assert [each.tokens for each in several.sample(requests, **asked)] == ours
"""
    tiny_llama(0).save_pretrained(tmp_path / "model")
    script = tmp_path / "program.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
