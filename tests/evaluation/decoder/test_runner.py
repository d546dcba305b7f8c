"""The ragged cache over unmodified models gives the logits of a full forward, also after rollbacks."""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from data.errors import UserError
from evaluation.decoder.linear import PackedLinear, packing_works
from evaluation.decoder.runner import Runner
from tests.evaluation.decoder.tiny_models import FAMILIES, SHAPE, VOCAB, family, llama


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("optimize", [True, False])
def test_ragged_rows_and_rollback_equal_a_full_forward(
    name: str, optimize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluation.decoder.linear.smallest_packed", lambda: 1)  # tiny layers too
    model = family(name)
    runner = Runner(model, 3, 128, optimize=optimize)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, VOCAB, (length,), generator=generator) for length in (70, 9, 1)]
    for row, ids in enumerate(rows):
        runner.prefill(ids, row)
    position = torch.tensor([len(ids) for ids in rows])
    wrong = torch.randint(0, VOCAB, (3, 5), generator=generator)
    runner.forward(wrong, position)  # rejected drafts: overwritten below
    right = torch.randint(0, VOCAB, (3, 3), generator=generator)
    logits = runner.logits(runner.forward(right, position))
    for row, ids in enumerate(rows):
        with torch.inference_mode():
            full = model(torch.cat((ids, right[row]))[None]).logits[0, -3:]
        assert torch.allclose(logits[row], full, atol=2e-4), (name, row)
    with torch.inference_mode():  # control: the rejected tokens' logits are far away
        other = model(torch.cat((rows[0], wrong[0, :3]))[None]).logits[0, -3:]
    assert not torch.allclose(logits[0], other, atol=1e-2)


def test_the_callers_model_stays_as_it_was_and_shares_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluation.decoder.linear.smallest_packed", lambda: 1)
    model = llama()
    runner = Runner(model, 1, 64)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    if packing_works():
        assert any(isinstance(module, PackedLinear) for module in runner.model.modules())
    assert runner.backbone.embed_tokens.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("chunk", [1, 7])
def test_prefill_in_chunks_equals_one_piece(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(20) % VOCAB
    whole = Runner(llama(), 1, 64).prefill(ids, 0)
    monkeypatch.setattr("evaluation.decoder.runner.PREFILL_CHUNK", chunk)
    assert torch.allclose(Runner(llama(), 1, 64).prefill(ids, 0), whole, atol=1e-4)


def test_a_model_that_cannot_roll_back_is_refused_by_name() -> None:
    sliding = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16))
    with pytest.raises(UserError, match=r"Mistral.*sliding_attention"):
        Runner(sliding, 1, 64)


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(UserError, match="256 positions"):
        Runner(llama(), 1, 300)
