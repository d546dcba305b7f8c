"""A compact drafter comes back as it drafts, and for its own target alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.errors import UserError
from distill import resolve
from distill.compact import COMPACT, check_embeddings, read_compact, write_compact
from distill.drafter import DraftConfig, InitConfig, build_drafter
from distill.models import Target
from distill.resolve import resolve_model
from evaluation.decoder.drafters import DraftModel
from tests.distill.conftest import tiny_llama

COUNTS = torch.arange(96).flip(0)


def build(target: Target, init: InitConfig, vocab_size: int | None = 24) -> DraftModel:
    def no_candidate(name: str) -> Path:
        raise AssertionError(name)

    config = DraftConfig(init=init, vocab_size=vocab_size)
    return build_drafter(config, target, COUNTS, Path("unused"), no_candidate)


@pytest.fixture
def drafter(target: Target) -> DraftModel:
    return build(target, InitConfig(**{"from": "target"}, layers=[0, 3]))


def test_it_comes_back_within_the_rounding_and_then_bit_for_bit(
    target: Target, drafter: DraftModel, tmp_path: Path
) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    write_compact(drafter, tmp_path / "one")
    once = read_compact(tmp_path / "one", target)
    assert once.vocab is not None and drafter.vocab is not None and torch.equal(once.vocab, drafter.vocab)
    kept = once.model.state_dict()
    for name, value in drafter.model.state_dict().items():
        step = value.abs().amax(dim=-1, keepdim=True) / 127
        assert ((kept[name] - value).abs() <= 1.6 * step).all(), name
    embedding = target.model.get_input_embeddings().weight
    assert torch.equal(kept["model.embed_tokens.weight"], embedding)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before, after = drafter.model(ids).logits, once.model(ids).logits
    assert 0 < (after - before).std() < 0.05 * before.std()
    write_compact(once, tmp_path / "two")
    twice = read_compact(tmp_path / "two", target).model.state_dict()
    assert all(torch.equal(value, twice[name]) for name, value in kept.items())


def test_it_is_small_and_holds_no_embeddings(drafter: DraftModel, tmp_path: Path) -> None:
    write_compact(drafter, tmp_path)
    own = sum(p.numel() for name, p in drafter.model.named_parameters() if "embed" not in name)
    assert (tmp_path / "drafter.safetensors").stat().st_size < 2 * own + 8000  # header included
    assert (tmp_path / COMPACT).is_file()


def test_another_target_is_refused(target: Target, drafter: DraftModel, tmp_path: Path) -> None:
    write_compact(drafter, tmp_path)
    for other in (tiny_llama(7), tiny_llama(7, hidden=64)):
        with pytest.raises(UserError, match="another target"):
            read_compact(tmp_path, replace(target, model=other))


def test_a_full_vocabulary_is_refused(target: Target, tmp_path: Path) -> None:
    whole = build(target, InitConfig(**{"from": "target"}, layers=[0]), vocab_size=None)
    with pytest.raises(UserError, match="reduced draft vocabulary"):
        write_compact(whole, tmp_path)


def test_embeddings_that_are_not_the_targets_are_refused_before_they_are_lost(
    target: Target, drafter: DraftModel, tmp_path: Path
) -> None:
    target.model.save_pretrained(tmp_path)
    check_embeddings(drafter, tmp_path)
    for other in (tiny_llama(7), tiny_llama(7, hidden=64)):  # another model's, and another width
        with pytest.raises(UserError, match="export it with --format hf"):
            check_embeddings(DraftModel(other, drafter.vocab), tmp_path)


def test_a_recipe_starts_from_a_shipped_one(
    target: Target, drafter: DraftModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "SHIPPED", tmp_path)
    (tmp_path / "general").mkdir()
    write_compact(drafter, tmp_path / "general")
    started = build(target, InitConfig(**{"from": "shipped:general"}))
    expected = read_compact(tmp_path / "general", target).model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in started.model.state_dict().items())
    with pytest.raises(UserError, match=r"no drafter 'generel' is shipped; there are: general"):
        resolve_model("shipped:generel", None, tmp_path)
    with pytest.raises(UserError, match="is shipped"):
        resolve_model("shipped:../general", None, tmp_path)
