"""Greedy verdicts, and a certificate that a path made lossy on purpose does not get."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from evaluation import lossless
from evaluation.decoder import judge
from evaluation.decoder.drafters import Draft, Drafter, DraftModel, DraftState, ModelDrafter
from evaluation.decoder.engine import Decoder, Request
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from evaluation.decoder.verify import BlockRule, MatchRule, within
from evaluation.lossless import DecodingPath, certify, compare_greedy, describe
from tests.evaluation.decoder.tiny_models import llama

REQUEST = Request([3, 4, 5], 12)


def plain_tokens(runner: Runner) -> list[int]:
    return Decoder(runner, eos_ids=[], options=SamplingOptions()).generate([REQUEST])[0].tokens


def test_a_wrong_token_is_a_bug_and_the_same_tokens_are_identical() -> None:
    runner = Runner(llama(0), 1, 64)
    tokens = plain_tokens(runner)
    assert compare_greedy(runner, REQUEST, tokens, tokens) == "identical"
    wrong = [*tokens[:5], (tokens[5] + 1) % 48, *tokens[6:]]
    assert compare_greedy(runner, REQUEST, tokens, wrong) == "bug"
    assert compare_greedy(runner, REQUEST, tokens, tokens[:-1]) == "bug"


def test_two_equal_logits_are_a_near_tie() -> None:
    model = llama(0)
    chosen = plain_tokens(Runner(model, 1, 64))[5]
    twin = (chosen + 1) % 48
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[chosen]
    runner = Runner(model, 1, 64)
    tokens = plain_tokens(runner)
    first = next(i for i, token in enumerate(tokens) if token in (twin, chosen))
    swapped = [*tokens[:first], twin if tokens[first] == chosen else chosen, *tokens[first + 1 :]]
    assert compare_greedy(runner, REQUEST, tokens, swapped) == "near_tie"


# The certificate

PROMPTS = [[1, 2, 3], [7], [9, 8, 7, 6, 5], [4, 4]]


def related(seed: int = 1, noise: float = 0.05) -> DraftModel:
    """The target with noise on its weights: a drafter that is often, not always, accepted."""
    model = llama(0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return DraftModel(model)


def path(argmax: bool = False, stop_below: float = 0.0) -> DecodingPath:
    return DecodingPath(llama(0), related(), 4, argmax, stop_below, PROMPTS)


def certificate(of: DecodingPath, greedy: dict[str, int] | None = None) -> dict[str, Any]:
    return certify(of, SamplingOptions(1.0), greedy, seed=0)


@pytest.mark.parametrize(("argmax", "stop_below"), [(False, 0.0), (True, 0.5)])
def test_a_lossless_path_gets_it(argmax: bool, stop_below: float) -> None:
    found = certificate(path(argmax, stop_below))
    assert found["holds"] and found["reasons"] == []
    assert found["greedy"] == {"outputs": 4, "identical_outputs": 4, "near_ties": 0, "bugs": 0}
    assert found["self_draft"]["greedy"] > 0.98 and found["self_draft"]["drafted"] > 0
    law = found["sampled"]
    assert law["pairs"] == 4 * lossless.TEXTS * 12 and law["tokens"] == 2 * law["pairs"]
    assert 0 < law["smallest_leak"] < 1 and 0 < law["smallest_distance"] < law["smallest_leak"]
    text = describe(found)
    assert text.startswith("Lossless.") and f"{law['smallest_leak']:.0%} of tokens leaking" in text


@dataclass
class LossyPath(DecodingPath):
    """A path whose drafter lies: it says that it drew from something flatter than it did."""

    def model_drafter(self, options: SamplingOptions) -> Drafter:
        class Lying(ModelDrafter):
            def draft(self, state: DraftState, count: int) -> Draft:
                draft = super().draft(state, count)
                if draft.probs is None:
                    return draft
                return replace(draft, probs=draft.probs**3 / (draft.probs**3).sum(-1, keepdim=True))

        return Lying(self.drafter, self.runner, options)


def test_a_drafter_that_lies_about_its_distribution_does_not_get_it() -> None:
    lossy = LossyPath(llama(0), related(), 4, False, 0.0, PROMPTS)
    found = certificate(lossy)
    assert not found["holds"]
    assert found["sampled"]["law_p_value"] < lossless.ALPHA
    assert found["sampled"]["control_p_value"] > lossless.ALPHA  # plain decoding is as it was
    assert "Sampled texts differ from the target's law" in " ".join(found["reasons"])
    assert describe(found).startswith("NOT lossless")


class WithoutResidual(BlockRule):
    def next_token_probs(self, *states: Any) -> torch.Tensor:
        target_probs, *_, accepted, _ = states
        return target_probs[torch.arange(len(accepted)), accepted]


class EverythingAccepted(MatchRule):
    def accept_probabilities(self, target_ids: Any, drafted: Any, proposed: Any) -> torch.Tensor:
        return within(proposed, drafted.shape[1]).double()


def test_a_rule_without_the_residual_does_not_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "BLOCK", WithoutResidual())
    found = certificate(path())
    assert not found["holds"] and found["sampled"]["law_p_value"] < lossless.ALPHA


def test_greedy_verification_that_accepts_everything_does_not_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MATCH", EverythingAccepted())
    found = certificate(path())
    assert not found["holds"] and found["greedy"]["bugs"] > 0
    assert "greedy outputs differ" in found["reasons"][0]


def test_bugs_on_the_evaluation_prompts_count_without_decoding_again() -> None:
    found = certificate(path(), {"outputs": 60, "identical_outputs": 59, "near_ties": 0, "bugs": 1})
    assert found["reasons"] == ["1 of 60 greedy outputs differ by more than a near tie."]


def test_a_broken_health_check_or_control_is_named() -> None:
    fine = certificate(path())
    parts = {name: fine[name] for name in ("greedy", "sampled", "self_draft")}
    assert lossless.failures(parts) == []
    sick = {**parts, "self_draft": {**parts["self_draft"], "sampled": 0.5}}
    assert "accepts only 50.0%" in lossless.failures(sick)[0]
    void = {**parts, "sampled": {**parts["sampled"], "control_p_value": 1e-9}}
    assert "proves nothing" in lossless.failures(void)[0]
