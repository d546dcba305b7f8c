"""Sampling with a drafter gives plain sampling's tokens, whatever the drafter, and says what it gains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.engines import Completion, SampleRequest
from data.records import open_samples
from distill.pipeline import run
from distill.recipe import RecipeError, load_recipe
from distill.self_acceleration import Gain, SpeculativeSampler
from evaluation.decoder.drafters import DraftModel
from evaluation.decoder.engine import Decoder, Request
from evaluation.decoder.judge import RuleName
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from tests.evaluation.decoder.tiny_models import llama, relative

REQUESTS = [SampleRequest([1 + (7 * i + j) % 45 for j in range(3 + i % 4)], seed=1000 + i) for i in range(12)]
NEW = 14


def sampler(drafter: torch.nn.Module, batch_size: int = 5) -> SpeculativeSampler:
    return SpeculativeSampler(
        llama(0), DraftModel(drafter), 3,
        eos_ids=[7], batch_size=batch_size, max_length=64, signal_temperature=1.0,
    )  # fmt: skip


def sample(made: SpeculativeSampler, temperature: float) -> list[Completion]:
    return made.sample(REQUESTS, temperature=temperature, max_new_tokens=NEW, on_tokens=lambda count: None)


def plain(temperature: float, rule: RuleName) -> list[list[int]]:
    decoder = Decoder(
        Runner(llama(0), 1, 64), eos_ids=[7], options=SamplingOptions(temperature=temperature), rule=rule
    )
    return [
        decoder.generate([Request(each.prompt, NEW, each.seed)])[0].tokens for each in REQUESTS
    ]  # one by one: what is sampled must not depend on the batch either


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["random", "related", "the target"])
def test_the_tokens_are_plain_samplings_whatever_the_drafter(kind: str, temperature: float) -> None:
    target = llama(0)
    drafters = {"random": llama(9), "related": relative(target), "the target": target}
    made = sampler(drafters[kind])
    assert [done.tokens for done in sample(made, temperature)] == plain(temperature, "shared_noise")
    (gain,) = made.gains
    assert gain.equal == gain.answers == 5
    if kind == "the target":
        assert gain.tokens_per_target_call > 2
    assert gain.speedup > 0


def test_another_rule_gives_other_tokens() -> None:
    # Else the equality above would say nothing about the noise.
    assert plain(1.0, "shared_noise") != plain(1.0, "block")
    assert plain(0.0, "shared_noise") == plain(0.0, "block")


def test_signals_are_those_of_the_emitted_tokens() -> None:
    made = sampler(relative(llama(0)))
    target = llama(0)
    for request, done in zip(REQUESTS, sample(made, 1.0), strict=True):
        ids = torch.tensor([[*request.prompt, *done.tokens]])
        with torch.inference_mode():
            logits = target(ids).logits[0, len(request.prompt) - 1 : -1]
        assert done.signals is not None and len(done.signals) == len(done.tokens)
        assert torch.allclose(done.signals.logsumexp, logits.logsumexp(-1), atol=1e-4)


def test_a_drafter_that_does_not_pay_is_said_to() -> None:
    slow = Gain(1.0, 48, 47, 100.0, 50.0, 1.1)
    assert "0.50x" in slow.note() and "WARNING: slower" in slow.note() and "47" in slow.note()
    assert "WARNING" not in Gain(0.0, 48, 48, 100.0, 150.0, 2.0).note()


SMALL = [
    "sample.tokens=300",
    "train.tokens=400",
    "evaluate={prompts: 2, num_speculative_tokens: [2], max_new_tokens: 6}",
    "data.prompts=[{source: builtin:structured, count: 120}]",
]


def test_a_recipe_samples_with_the_champion_of_an_earlier_round(tmp_path: Path) -> None:
    def quiet(text: str) -> None:
        pass

    first = run(load_recipe("smoke", SMALL), tmp_path, "select", fresh=False, say=quiet)
    again = load_recipe("smoke", [*SMALL, "sample.drafter=models:/smoke@champion"])
    second = run(again, tmp_path, "sample", fresh=False, say=quiet).outcomes["sample"]
    assert second.stage.key != first.outcomes["sample"].stage.key
    assert sum("plain sampling at temperature" in note for note in second.notes) == 2
    greedy = [
        {(r.prompt_id, r.sample_index): r.input_ids for r in open_samples(folder).where(temperature=0.0)}
        for folder in (first.outcomes["sample"].stage.directory, second.stage.directory)
    ]
    assert greedy[0] == greedy[1]
    assert open_samples(second.stage.directory).has_signals


@pytest.mark.parametrize("drafter", ["random:1", "org/model"])
def test_what_is_no_drafter_is_refused(drafter: str) -> None:
    with pytest.raises(RecipeError, match="give models:/NAME@ALIAS"):
        load_recipe("smoke", [f"sample.drafter={drafter}"])
