from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

from data.errors import UserError
from distill.drafter import DraftConfig, InitConfig, build_drafter
from distill.models import Target, cast_parameters, save_drafter
from distill.prune import check_prunable, prune
from evaluation.decoder.drafters import DraftModel

COUNTS = torch.arange(96).flip(0)  # the lower the id, the more frequent


def config(
    init: str = "target", layers: list[int] | None = None, vocab_size: int | None = None
) -> DraftConfig:
    return DraftConfig(init=InitConfig(**{"from": init}, layers=layers), vocab_size=vocab_size)


def no_candidate(name: str) -> Path:
    raise AssertionError(name)


@pytest.fixture
def build(target: Target, tmp_path: Path) -> Callable[..., DraftModel]:
    def build(
        wanted: DraftConfig, candidate: Path | None = None, counts: torch.Tensor = COUNTS
    ) -> DraftModel:
        return build_drafter(
            wanted, target, counts, tmp_path / "cache", lambda name: candidate or no_candidate(name)
        )

    return build


def save_family(model: PreTrainedModel, target: Target, directory: Path) -> Path:
    model.save_pretrained(directory)
    target.tokenizer.save_pretrained(directory)
    return directory


def test_pruned_from_the_target(target: Target, build: Callable[..., DraftModel]) -> None:
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    drafter = build(config(layers=[0, 3], vocab_size=16))
    assert drafter.vocab is not None and drafter.vocab.tolist() == list(range(16))
    assert drafter.model.config.num_hidden_layers == 2 and target.model.config.num_hidden_layers == 4
    assert [layer.self_attn.layer_idx for layer in drafter.model.model.layers] == [0, 1]
    ours = drafter.model.state_dict()
    assert torch.equal(ours["model.layers.1.mlp.up_proj.weight"], before["model.layers.3.mlp.up_proj.weight"])
    assert torch.equal(ours["model.norm.weight"], before["model.norm.weight"])
    assert torch.equal(ours["lm_head.weight"], before["lm_head.weight"][:16])
    assert all(parameter.requires_grad for parameter in drafter.model.parameters())
    # copies: training the drafter leaves the target alone
    with torch.no_grad():
        for parameter in drafter.model.parameters():
            parameter.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())


def test_all_layers_and_ids_are_the_target_again(target: Target, build: Callable[..., DraftModel]) -> None:
    drafter = build(config(layers=[0, 1, 2, 3]))
    ids = torch.arange(12).unsqueeze(0)
    assert drafter.vocab is None
    assert torch.equal(drafter.model(ids).logits, target.model(ids).logits)
    assert drafter.model.lm_head.weight is not drafter.model.model.embed_tokens.weight  # untied


def test_a_reduced_head_is_a_selection_of_the_full_one(build: Callable[..., DraftModel]) -> None:
    counts = torch.zeros(96, dtype=torch.int64)
    counts[[90, 40, 41]] = 5
    reduced = build(config(layers=[1], vocab_size=5), counts=counts)
    full = build(config(layers=[1]))
    assert reduced.vocab is not None
    assert reduced.vocab.tolist() == [1, 2, 40, 41, 90]  # with the tokenizer's special ids 1 and 2
    ids = torch.arange(12).unsqueeze(0)
    torch.testing.assert_close(reduced.model(ids).logits, full.model(ids).logits[..., reduced.vocab])


def test_a_reduced_size_that_covers_all_ids_is_the_full_vocabulary(build: Callable[..., DraftModel]) -> None:
    assert build(config(layers=[1], vocab_size=96)).vocab is None


def test_bfloat16_keeps_exact_rotary_buffers(target: Target, tmp_path: Path) -> None:
    narrow = prune(target.model, [0, 1, 2, 3], target.model.lm_head.weight)
    cast_parameters(narrow, torch.bfloat16)
    own = Target(narrow, target.tokenizer, (2,), 2, "digest", "narrow")
    drafter = build_drafter(config(layers=[0]), own, COUNTS, tmp_path, no_candidate)
    assert drafter.model.dtype == torch.bfloat16
    assert torch.equal(drafter.model.model.rotary_emb.inv_freq, target.model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("layers", [[4], [-1], [1, 0], [0, 0], []])
def test_layers_that_cannot_be(layers: list[int], build: Callable[..., DraftModel]) -> None:
    with pytest.raises(UserError, match="rising order, from 0 to 3"):
        build(config(layers=layers))


def test_the_target_needs_layers(build: Callable[..., DraftModel]) -> None:
    with pytest.raises(UserError, match=r"draft\.init\.layers is missing"):
        build(config())


def test_family_member_whole_and_pruned(
    target: Target,
    tmp_path: Path,
    build: Callable[..., DraftModel],
    make_llama: Callable[..., PreTrainedModel],
) -> None:

    family = make_llama(5, hidden=16)
    path = save_family(family, target, tmp_path / "family")
    ids = torch.arange(12).unsqueeze(0)
    whole = build(config(str(path)))
    assert whole.vocab is None and torch.equal(whole.model(ids).logits, family(ids).logits)
    assert whole.model.lm_head.weight is whole.model.model.embed_tokens.weight  # stays tied
    reduced = build(config(str(path), layers=[0, 3], vocab_size=16))
    assert reduced.model.config.num_hidden_layers == 2
    assert torch.equal(
        reduced.model.lm_head.weight, family.lm_head.weight[:16]
    )  # its own rows, its own width


def test_another_tokenizer_is_refused(
    tmp_path: Path,
    build: Callable[..., DraftModel],
    make_llama: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.add_tokens(["new"])
    make_llama(5).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="is not the target's"):
        build(config(str(tmp_path / "other")))


def test_a_candidate_keeps_the_ids_for_which_the_samples_leave_room(
    target: Target, tmp_path: Path, build: Callable[..., DraftModel]
) -> None:
    vocab = torch.tensor([1, 2, 50, 60, 70])
    candidate = DraftModel(prune(target.model, [0, 2], torch.randn(5, 32)), vocab)
    save_drafter(candidate, tmp_path / "candidate")
    # the samples use 3 and 70: 3 comes in though the candidate lacks it; 50 stays, there is no room for 60
    counts = torch.zeros(96, dtype=torch.int64)
    counts[[3, 70]] = 1
    moved = build(config("models:/x@champion", vocab_size=5), tmp_path / "candidate", counts)
    assert moved.vocab is not None and moved.vocab.tolist() == [1, 2, 3, 50, 70]
    head = moved.model.lm_head.weight
    assert torch.equal(head[[0, 1, 3, 4]], candidate.model.lm_head.weight[[0, 1, 2, 4]])
    # samples of none but the candidate's ids change nothing
    kept = build(config("models:/x@champion", vocab_size=5), tmp_path / "candidate", 0 * counts)
    assert kept.vocab is not None and kept.vocab.tolist() == vocab.tolist()
    assert torch.equal(kept.model.lm_head.weight, candidate.model.lm_head.weight)
    full = build(config("models:/x@champion"), tmp_path / "candidate")
    assert full.vocab is None
    assert torch.equal(full.model.lm_head.weight[vocab], candidate.model.lm_head.weight)


def test_rows_that_the_candidate_lacks_are_moved_as_training_moved_the_others(
    target: Target, tmp_path: Path, build: Callable[..., DraftModel]
) -> None:
    theirs = target.model.lm_head.weight.detach()
    vocab, moved = torch.arange(0, 80), torch.eye(32) + 0.3 * torch.randn(32, 32)
    save_drafter(
        DraftModel(prune(target.model, [0, 2], theirs[vocab] @ moved), vocab), tmp_path / "candidate"
    )
    full = build(config("models:/x@champion"), tmp_path / "candidate").model.lm_head.weight
    torch.testing.assert_close(full, theirs @ moved, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(full[80:], theirs[80:], atol=0.1)  # the control: the target's rows as they are
    # too few rows to tell a map by: what they do not tell stays the target's
    save_drafter(DraftModel(prune(target.model, [0], theirs[:1] @ moved), vocab[:1]), tmp_path / "one")
    guessed = build(config("models:/x@champion"), tmp_path / "one").model.lm_head.weight
    along = (theirs @ theirs[0]) / (theirs[0] @ theirs[0])
    expected = theirs + along[:, None] * (theirs[0] @ moved - theirs[0])
    torch.testing.assert_close(guessed, expected, rtol=1e-4, atol=1e-4)


def test_missing_rows_cannot_come_from_a_wider_target(
    tmp_path: Path, build: Callable[..., DraftModel], make_llama: Callable[..., PreTrainedModel]
) -> None:

    narrow = make_llama(5, hidden=16)
    save_drafter(DraftModel(prune(narrow, [0], torch.randn(5, 16)), torch.arange(5)), tmp_path / "narrow")
    with pytest.raises(UserError, match=r"set draft\.vocab_size to 5"):
        build(config("models:/x@champion", vocab_size=7), tmp_path / "narrow")
    own = build(config("models:/x@champion", vocab_size=5), tmp_path / "narrow").vocab
    assert own is not None and own.tolist() == [0, 1, 2, 3, 4]


def test_other_layouts_are_refused_by_name(target: Target) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(UserError, match="GPT2LMHeadModel, which is not laid out like Llama"):
        check_prunable(gpt2, "gpt2")
    check_prunable(target.model, "tiny")


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="widht"):
        DraftConfig.model_validate({"init": {"from": "target", "layers": [0]}, "widht": 3})
