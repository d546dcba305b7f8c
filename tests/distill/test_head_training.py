"""Medusa's and EAGLE's heads in training: where they start, what they learn, and how a run is resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data.records import Samples, collate
from distill.drafter import DraftConfig, build_drafter
from distill.head_loss import POSITION_DECAY, head_forward, head_inputs
from distill.losses import forward_kl
from distill.models import Target, load_drafter
from distill.train import ACCEPTED, TrainConfig, train_drafter
from evaluation.decoder.drafters import DraftModel
from evaluation.head import Head

KINDS: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa", "heads": 3},
    "medusa, shared head": {"kind": "medusa", "heads": 3, "shared_head": True},
    "eagle": {"kind": "eagle", "rollout_steps": 3},
}
KIND = pytest.mark.parametrize("kind", KINDS)


def ignore(step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
    pass


def build(kind: str, target: Target, vocab_size: int | None = 48) -> DraftModel:
    config = DraftConfig(**KINDS[kind], vocab_size=vocab_size)
    torch.manual_seed(5)
    return build_drafter(config, target, torch.arange(96), Path(), lambda name: Path(name))


def train(kind: str, target: Target, samples: Samples, out_dir: Path, **fields: Any) -> Any:
    report = fields.pop("report", ignore)
    drafter = build(kind, target)
    config = TrainConfig(**{"tokens": 600, "learning_rate": 1e-2, "batch_size": 4, **fields})
    result = train_drafter(
        drafter, target, samples, config, temperature=1.0, seed=0, out_dir=out_dir, report=report
    )
    return result, {name: value.clone() for name, value in drafter.model.state_dict().items()}


@KIND
@pytest.mark.parametrize("vocab_size", [None, 48])
def test_starts_from_the_targets_head(kind: str, vocab_size: int | None, target: Target) -> None:
    drafter = build(kind, target, vocab_size)
    head = target.model.lm_head.weight
    rows = head if drafter.vocab is None else head[drafter.vocab]
    assert torch.equal(drafter.model.head(2).weight, rows)
    assert (drafter.vocab is None) == (vocab_size is None)
    names = set(drafter.model.state_dict())
    assert not any("embed" in name for name in names)  # they are the target's


def test_an_untrained_medusa_head_says_what_the_target_says(target: Target) -> None:
    drafter = build("medusa", target, None)
    hidden = torch.randn(4, 32)
    with torch.no_grad():
        said = drafter.model(hidden)
    assert said.shape == (4, 3, 96)
    assert torch.allclose(said, target.model.lm_head(hidden)[:, None].expand_as(said), atol=1e-5)


@pytest.fixture(scope="module")
def samples(make_samples: Callable[..., Samples]) -> Samples:
    return make_samples(40)


@pytest.fixture(scope="module")
def trained(
    target: Target, samples: Samples, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Any, dict[str, torch.Tensor]]]:
    """A whole training of a kind, done once."""
    done: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in done:
            done[kind] = train(kind, target, samples, tmp_path_factory.mktemp("whole"))
        return done[kind]

    return get


@KIND
def test_training_accepts_more_and_leaves_the_target_alone(
    kind: str, target: Target, trained: Callable[[str], Any]
) -> None:
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    history = trained(kind)[0].history
    assert max(check["sampled"] for check in history) > history[0]["sampled"] + 0.004
    assert {"sampled", "argmax", "greedy", "greedy_2", "greedy_3", ACCEPTED} < set(history[0])
    assert all(torch.equal(before[name], value) for name, value in target.model.state_dict().items())


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_run_that_was_killed_ends_with_the_same_bits(
    kind: str, target: Target, samples: Samples, trained: Callable[[str], Any], tmp_path: Path
) -> None:
    def killed(step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
        if step == steps // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(kind, target, samples, tmp_path, report=killed)
    steps: list[int] = []
    again, resumed = train(kind, target, samples, tmp_path, report=lambda step, *_: steps.append(step))
    assert 1 < steps[0]
    whole, weights = trained(kind)
    assert weights.keys() == resumed.keys()
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert again.history == whole.history
    ours, theirs = (load_file(run.directory / "model.safetensors") for run in (trained(kind)[0], again))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@KIND
def test_the_saved_drafter_is_the_trained_one(
    kind: str, target: Target, trained: Callable[[str], Any]
) -> None:
    directory = trained(kind)[0].directory
    found = load_drafter(directory, "cpu")
    assert type(found.model) is type(build(kind, target).model)
    stored = load_file(directory / "model.safetensors")
    assert stored.keys() == found.model.state_dict().keys()
    assert all(torch.equal(stored[name], value) for name, value in found.model.state_dict().items())
    assert found.vocab is not None and len(found.vocab) == 48


def loss_of(kind: str, target: Target, samples: Samples, *, cached: bool, name: str = "forward_kl") -> float:
    torch.manual_seed(0)
    drafter = build(kind, target)
    with torch.no_grad():
        for weight in drafter.model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    batch = collate(samples, range(8), pad_id=2)
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "completion_mask": batch.completion_mask}
    if cached:
        assert batch.signals is not None
        inputs |= {"hidden": batch.signals.hidden, "logsumexp": batch.signals.logsumexp}
    inputs |= head_inputs(target.model, drafter.model, inputs, 1.0, name != "cross_entropy")  # type: ignore[arg-type]
    assert drafter.vocab is not None
    head = target.model.lm_head.weight[drafter.vocab]
    rows = torch.full((96,), -1)
    rows[drafter.vocab] = torch.arange(48)
    loss, _, _ = head_forward(
        drafter.model,  # type: ignore[arg-type]
        name=name,  # type: ignore[arg-type]
        eta=3.0,
        beta=0.5,
        temperature=1.0,
        target_head=Head(head),
        rows=rows,
        **inputs,
    )
    return float(loss.detach())


def test_eagle_trains_alike_on_kept_and_live_signals(target: Target, samples: Samples) -> None:
    live = loss_of("eagle", target, samples, cached=False)
    assert loss_of("eagle", target, samples, cached=True) == pytest.approx(live, rel=1e-5)


def test_medusa_reads_the_prompt_only_where_the_target_reads_it_too(target: Target, samples: Samples) -> None:
    """Kept states begin with the answer, so the first answer tokens have no draft."""
    assert (
        0 < loss_of("medusa", target, samples, cached=True) < loss_of("medusa", target, samples, cached=False)
    )


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_the_loss_is_the_weighted_mean_over_positions_of_chains_by_hand(
    kind: str, target: Target, samples: Samples
) -> None:
    """Every chain of every text, drafted token after token with the target's own states as they were then."""
    torch.manual_seed(0)
    drafter = build(kind, target)
    model = drafter.model
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    total = [0.0, 0.0, 0.0]
    with torch.no_grad():
        for index in range(8):
            record = samples[index]
            ids = torch.tensor([record.input_ids])
            out = target.model.model(ids, output_hidden_states=True)
            law = target.model.lm_head(out.last_hidden_state)[0].log_softmax(-1)
            for anchor in range(len(record.input_ids) - 2):
                for step, hidden in enumerate(chain(kind, model, target, ids, out, anchor)):
                    token = anchor + 2 + step
                    if token < len(record.input_ids) and record.completion_mask[token]:
                        said = model.head(step)(hidden)[None]
                        total[step] += float(forward_kl(said, law[None, token - 1, drafter.vocab]))
    weights = [POSITION_DECAY**step for step in range(3)]
    expected = sum(weight * part for weight, part in zip(weights, total, strict=True)) / sum(weights)
    assert loss_of(kind, target, samples, cached=False) == pytest.approx(expected, rel=1e-4)


def chain(kind: str, model: Any, target: Target, ids: Any, out: Any, anchor: int) -> list[torch.Tensor]:
    """States of three drafted tokens of one chain, without a cache: each step reads its whole past anew."""
    if kind == "medusa":
        return [block(out.last_hidden_state[0, anchor]) for block in model.blocks]
    features = torch.cat([out.hidden_states[layer] for layer in model.feature_layers], dim=-1)
    fed, found = model.fc(features[:, : anchor + 1]), []
    for _ in range(min(3, ids.shape[1] - anchor - 1)):
        width = fed.shape[1]
        embeddings = target.model.model.embed_tokens(ids[:, 1 : width + 1])
        mask = torch.ones(1, 1, width, width, dtype=torch.bool).tril()
        last = model.extend(embeddings, fed, mask, torch.arange(width)[None], None)[:, -1:]
        found.append(model.norm(last)[0, 0])
        fed = torch.cat((fed, last), dim=1)
    return found
