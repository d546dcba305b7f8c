"""In bfloat16 forwards of different widths round differently: what that may change, and no more."""

import pytest
import torch

from evaluation.decoder.engine import Request
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions, probabilities
from evaluation.lossless import compare_greedy
from tests.evaluation.decoder.decoders import decoder, requests, tokens
from tests.evaluation.decoder.tiny_models import FAMILIES, family, llama, relative

COUNT = 4
SAMPLED = SamplingOptions(1.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers_part_at_near_ties_alone(name: str) -> None:
    target = family(name).bfloat16()
    wanted = requests(12, 40)
    plain = tokens(decoder(target, batch=1, eos=()).generate(wanted))
    judge = Runner(target, 1, 128)
    for draft in (target, relative(target)):
        speculative = tokens(decoder(target, draft, COUNT, batch=4, eos=()).generate(wanted))
        verdicts = [
            compare_greedy(judge, request, one, other)
            for request, one, other in zip(wanted, plain, speculative, strict=True)
        ]
        assert set(verdicts) <= {"identical", "near_tie"}
        assert verdicts.count("identical") >= len(wanted) // 2


def width_difference(target, wanted: list[Request], answers: list[list[int]]) -> float:
    """Mean total variation distance between the target's laws by forwards of width 1 and of width K + 1."""
    narrow, wide = Runner(target, 1, 128), Runner(target, 1, 128)
    distances = []
    for request, answer in zip(wanted, answers, strict=True):
        text = torch.tensor([*request.prompt, *answer])
        first = len(request.prompt)
        laws = []
        for runner, width in ((narrow, 1), (wide, COUNT + 1)):
            runner.prefill([text[:first]], 0, [0])
            pieces = [
                runner.logits(runner.forward(piece[None], torch.tensor([first + i * width])))[0]
                for i, piece in enumerate(text[first:].split(width))
            ]
            laws.append(probabilities(torch.cat(pieces), SAMPLED))
        distances.append((laws[0] - laws[1]).abs().sum(dim=1) / 2)
    return float(torch.cat(distances).mean())


def test_the_target_as_its_own_drafter_loses_what_the_widths_differ_by() -> None:
    wanted = [Request(request.prompt, 60, seed=request.seed) for request in requests(24)]
    for target, rounds_apart in ((llama(0), False), (llama(0).bfloat16(), True)):
        engine = decoder(target, target, COUNT, batch=1, options=SAMPLED, eos=(), rule="token")
        answers = tokens(engine.generate(wanted))
        lost = 1 - sum(engine.account.stood) / sum(engine.account.reached)
        distance = width_difference(target, wanted, answers)
        assert (distance > 1e-5) == rounds_apart
        error = (max(distance, 1e-6) / sum(engine.account.reached)) ** 0.5
        assert lost <= (distance + 4 * error if rounds_apart else 0)
