"""Chosen tokens and samples, against brute force; and a training on them from its first step to its last."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import distill.training_step
from data.records import Samples
from distill.chunked import chunked_loss
from distill.data_selection import chosen_count, keep_flattest, most_learnable, reference_kl, token_kl
from distill.heads import TargetRows, row_of_id, target_rows
from distill.losses import forward_kl
from distill.models import Target
from distill.prune import prune
from distill.train import TrainConfig, train_drafter
from evaluation.acceptance import teacher_forced
from evaluation.decoder.drafters import DraftModel
from evaluation.signals import target_signals

VOCAB = torch.arange(0, 96, 2)


def new_drafter(target: Target) -> DraftModel:
    return DraftModel(prune(target.model, [0, 3], target.model.lm_head.weight[VOCAB]), VOCAB)


def ignore(*_: Any) -> None:
    pass


def test_the_tokens_with_the_largest_gap_are_chosen() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head, theirs = (torch.randn(*shape, generator=generator) for shape in ((10, 4), (7, 4), (10, 4)))
    logits = theirs @ head.T / 0.5
    rows = TargetRows(theirs, head, logits.logsumexp(-1))
    kl = forward_kl(hidden @ head.T / 0.5, logits.log_softmax(-1))
    torch.testing.assert_close(token_kl(hidden, head, rows, 0.5), kl)
    reference = torch.randn(10, generator=generator).abs()
    reference[kl.argmax()] = kl.max()  # what the reference could not learn either
    chosen = most_learnable(kl - reference, 0.3)
    assert chosen.tolist() == sorted((kl - reference).argsort(descending=True)[:3].tolist())
    assert chosen.tolist() != sorted(kl.argsort(descending=True)[:3].tolist())  # the reference matters
    assert [chosen_count(tokens, 0.4) for tokens in (1, 5, 10)] == [1, 2, 4]


def one_of_two(rank: int, port: int, shares: list[torch.Tensor], chosen: list[list[int]]) -> None:
    from accelerate import PartialState

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    state = PartialState(cpu=True)
    assert state.num_processes == 2
    assert most_learnable(shares[rank], 0.4).tolist() == chosen[rank]
    mine = shares[rank] if rank == 0 else shares[rank][:0]  # a batch of one sample leaves a process nothing
    assert most_learnable(mine, 0.4).tolist() == (most_of(shares[0], 0.4) if rank == 0 else [])
    state.destroy_process_group()


def most_of(gaps: torch.Tensor, share: float) -> list[int]:
    return sorted(gaps.argsort(descending=True)[: round(share * len(gaps))].tolist())


@pytest.mark.slow
def test_two_processes_choose_among_the_tokens_of_both() -> None:
    gaps = torch.randn(30, generator=torch.Generator().manual_seed(0))
    gaps[:11] += 0.5  # so that one of them has more of the largest
    both = most_of(gaps, 0.4)
    chosen = [[place for place in both if place < 11], [place - 11 for place in both if place >= 11]]
    assert len(chosen[0]) > round(0.4 * 11) and len(chosen[1]) < round(0.4 * 19)  # not each in its part
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(one_of_two, args=(port, [gaps[:11], gaps[11:]], chosen), nprocs=2)


def test_the_most_likely_ids_choose_as_all_do() -> None:
    """`topk` signals that hold every id, over a reduced vocabulary, with a token's mass outside it."""
    generator = torch.Generator().manual_seed(1)
    hidden, head, theirs = (torch.randn(*shape, generator=generator) for shape in ((10, 4), (7, 4), (10, 4)))
    vocab = torch.tensor([0, 2, 3, 6])
    log_probs = (theirs @ head.T / 0.5).log_softmax(-1)
    kept, ids = log_probs.topk(7, dim=-1)
    rows = row_of_id(vocab, 7, hidden.device)
    likely = target_rows({"ids": ids.int(), "log_probs": kept, "tail": torch.zeros(10)}, head[vocab], rows)
    logsumexp = (theirs @ head.T / 0.5).logsumexp(-1)
    told = target_rows({"hidden": theirs, "logsumexp": logsumexp}, head[vocab], rows)
    expected = token_kl(hidden, head[vocab], told, 0.5)
    torch.testing.assert_close(token_kl(hidden, head[vocab], likely, 0.5), expected)
    chosen = torch.tensor([1, 4, 9])
    for each in (likely, told):
        torch.testing.assert_close(
            token_kl(hidden[chosen], head[vocab], each.take(chosen), 0.5), expected[chosen]
        )
    full = target_rows({"hidden": theirs}, head, None)  # its normaliser is found on the way
    known = TargetRows(theirs, head, logsumexp)
    torch.testing.assert_close(token_kl(hidden, head, full, 0.5), token_kl(hidden, head, known, 0.5))


def test_the_flattest_samples_are_kept(target: Target, make_samples: Callable[..., Samples]) -> None:
    samples = make_samples(20)
    kept = keep_flattest(samples, target, 0.5, batch_size=3, temperature=1.0)
    assert kept.where(split="select").records == samples.where(split="select").records
    train = samples.where(split="train")
    entropy = []
    for record in train:
        log_probs = target.model(torch.tensor([record.input_ids])).logits[0, :-1].log_softmax(-1)
        own = -(log_probs.exp() * log_probs).sum(-1)[torch.tensor(record.completion_mask[1:])]
        entropy.append(own.mean().item())
    best = sorted(range(len(train)), key=lambda index: -entropy[index])[: round(0.5 * len(train))]
    assert kept.where(split="train").records == [train[index] for index in sorted(best)]
    torch.testing.assert_close(kept.signals(0).hidden, samples.signals(0).hidden)
    live = keep_flattest(Samples(samples.records, None), target, 0.5, batch_size=4, temperature=1.0)
    assert live.records == kept.records


def test_the_reference_is_trained_once_and_kept(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, drafter = make_samples(12), new_drafter(target)
    before = {name: value.clone() for name, value in drafter.model.state_dict().items()}
    config = TrainConfig(tokens=200, learning_rate=5e-3, batch_size=4, learnable_share=0.4)

    def reference() -> list[torch.Tensor]:
        return reference_kl(
            drafter, target, samples, config, temperature=1.0, seed=0, out_dir=tmp_path, report=ignore
        )

    found = reference()
    train = samples.where(split="train")
    assert [len(part) for part in found] == [record.completion_tokens for record in train]
    assert all(torch.equal(value, before[name]) for name, value in drafter.model.state_dict().items())
    head = target.model.lm_head.weight
    start = new_drafter(target)
    told = [target_signals(target.model, _batch(train, index), 1.0) for index in range(len(train))]
    fresh = [
        token_kl(_states(start, train, index), start.model.lm_head.weight, _rows(signals, head), 1.0)
        for index, signals in enumerate(told)
    ]
    assert torch.cat(found).mean() < 0.8 * torch.cat(fresh).mean()  # it has learnt
    monkeypatch.setattr("distill.train.train_drafter", None)
    again = reference()
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def _batch(samples: Samples, index: int) -> Any:
    from data.records import collate

    return collate(samples, [index], 0)


def _states(drafter: DraftModel, samples: Samples, index: int) -> torch.Tensor:
    from evaluation.signals import completion_states

    batch = _batch(samples, index)
    with torch.no_grad():
        return completion_states(drafter.model, batch.input_ids, batch.completion_mask)


def _rows(signals: Any, head: torch.Tensor) -> TargetRows:
    return TargetRows(signals.hidden, head[VOCAB], signals.logsumexp)


def test_training_on_a_share_of_the_tokens(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_samples(16)
    rows: list[tuple[int, str]] = []

    def spy(name: Any, hidden: torch.Tensor, *rest: Any, **named: Any) -> Any:
        rows.append((len(hidden), name))
        return chunked_loss(name, hidden, *rest, **named)

    monkeypatch.setattr(distill.training_step, "chunked_loss", spy)
    loss = {"name": "lk_hybrid", "warm_start": {"name": "forward_kl", "share": 0.5}}
    config = TrainConfig.model_validate(
        {"tokens": 400, "learning_rate": 5e-3, "batch_size": 4, "learnable_share": 0.4, "loss": loss}
    )
    drafter = new_drafter(target)
    seen: list[dict[str, float]] = []
    result = train_drafter(
        drafter,
        target,
        samples,
        config,
        temperature=1.0,
        seed=0,
        out_dir=tmp_path,
        report=lambda *step: seen.append(step[3]),
        metric="sampled",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
    reference, own = rows[: result.steps], rows[result.steps :]
    assert [chosen_count(count, 0.4) for count, _ in reference] == [count for count, _ in own]
    assert {name for _, name in reference} == {"forward_kl"}
    half = -(-result.steps // 2)
    assert [name for _, name in own] == ["forward_kl"] * half + ["lk_hybrid"] * (result.steps - half)
    assert any("reference_loss" in measures for measures in seen)
    table = teacher_forced(
        drafter, target.model.lm_head.weight, samples.where(split="train"), temperature=1.0, batch_size=4
    )
    start = teacher_forced(
        new_drafter(target),
        target.model.lm_head.weight,
        samples.where(split="train"),
        temperature=1.0,
        batch_size=4,
    )
    assert table.means()["sampled"] > start.means()["sampled"] + 0.03


def test_cross_entropy_asks_no_target() -> None:
    for option in ({"learnable_share": 0.4}, {"on_policy": {"share": 0.25}}):
        with pytest.raises(ValidationError, match="does not look at"):
            TrainConfig.model_validate({"tokens": 1, "loss": {"name": "cross_entropy"}, **option})
