"""The ragged cache over unmodified models gives the logits of a full forward, also after rollbacks."""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from data.errors import UserError
from evaluation.decoder.linear import PackedLinear, packing_works
from evaluation.decoder.runner import Runner, read_together
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
        runner.prefill([ids], row, [0])
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
    whole = Runner(llama(), 1, 64).prefill([ids], 0, [0])
    monkeypatch.setattr("evaluation.decoder.runner.PREFILL_CHUNK", chunk)
    assert torch.allclose(Runner(llama(), 1, 64).prefill([ids], 0, [0]), whole, atol=1e-4)


@pytest.mark.parametrize("chunk", [7, 24, 512])
def test_texts_that_are_read_together_end_as_each_does_by_itself(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluation.decoder.runner.PREFILL_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    before = torch.randint(0, VOCAB, (5,), generator=generator)
    texts = [torch.randint(0, VOCAB, (length,), generator=generator) for length in (3, 9, 4, 20)]
    starts = [0, 5, 2, 5]
    runner = Runner(llama(), 5, 64)
    for row, start in enumerate(starts, start=1):
        if start:
            runner.prefill([before[:start]], row, [0])
    states = runner.prefill(texts, 1, starts)
    following = torch.randint(0, VOCAB, (4, 2), generator=generator)
    ends = torch.tensor(starts) + torch.tensor([len(text) for text in texts])
    logits = runner.logits(runner.forward(following, ends, slice(1, 5)))
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        whole = torch.cat((before[:start], text, following[row]))
        alone = Runner(llama(), 1, 64)
        wanted = alone.forward(whole[None], torch.zeros(1, dtype=torch.int64))[0]
        assert torch.allclose(states[row], wanted[-3], atol=1e-4), row
        assert torch.allclose(logits[row], alone.logits(wanted[-2:]), atol=2e-4), row
        assert not torch.allclose(states[row], wanted[-2], atol=1e-2), row  # control: not any state will do


def test_texts_are_read_together_as_long_as_they_fit_with_their_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evaluation.decoder.runner.PREFILL_CHUNK", 10)
    assert read_together([2, 3, 3, 4, 30, 1, 1], [0] * 7) == [
        slice(0, 3),
        slice(3, 4),
        slice(4, 5),
        slice(5, 7),
    ]
    assert read_together([5, 5], [0, 0]) == [slice(0, 2)]
    assert read_together([5, 6], [0, 0]) == [
        slice(0, 1),
        slice(1, 2),
    ]  # 11 tokens would fit, 12 with padding do not


def test_no_padding_stands_behind_the_last_position() -> None:
    """A nearly full row beside one that has much to read: start and width together do not fit."""
    assert read_together([9, 2], [0, 10]) == [slice(0, 1), slice(1, 2)]
    assert read_together([9, 2], [4, 10]) == [slice(0, 1), slice(1, 2)]
    assert read_together([9, 2], [4, 4]) == [slice(0, 2)]
    generator = torch.Generator().manual_seed(0)
    full, other = (torch.randint(0, VOCAB, (length,), generator=generator) for length in (64, 20))
    runner = Runner(llama(), 2, 64)
    runner.prefill([full[:60]], 1, [0])
    states = runner.prefill([other, full[60:]], 0, [0, 60])
    for state, text in zip(states, (other, full), strict=True):
        alone = Runner(llama(), 1, 64).prefill([text], 0, [0])
        assert torch.allclose(state, alone[0], atol=1e-4)


def test_a_model_that_cannot_roll_back_is_refused_by_name() -> None:
    sliding = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16))
    with pytest.raises(UserError, match=r"Mistral.*sliding_attention"):
        Runner(sliding, 1, 64)


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(UserError, match="256 positions"):
        Runner(llama(), 1, 300)
