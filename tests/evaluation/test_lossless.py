import torch

from evaluation.decoder.engine import Decoder, Request
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from evaluation.lossless import compare_greedy
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
