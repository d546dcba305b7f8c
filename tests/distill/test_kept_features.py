"""The states of several layers that sampling keeps for EAGLE: as the target computes them, and training does
not ask it again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.engines import SampleRequest
from data.errors import UserError
from data.records import SampleRecord, Samples, collate, open_samples, write_shard
from data.signals import Signals
from distill import head_loss
from distill.models import Target
from distill.recipe import load_recipe
from evaluation.decoder.sampler import BuiltinSampler
from tests.distill.test_head_pipeline import recipe_of
from tests.distill.test_head_training import build, train
from tests.evaluation.decoder.decoders import decoder, requests
from tests.evaluation.decoder.tiny_models import llama, relative

LAYERS = [1, 2, 3]  # `feature_layers` of four


@pytest.fixture(scope="module")
def directory(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of samples, in batches whose rows end and are refilled, with features."""
    folder = tmp_path_factory.mktemp("features")
    sampler = BuiltinSampler(
        target.model, eos_ids=[2], batch_size=4, max_length=32, signal_temperature=1.0, layers=LAYERS
    )
    generator = torch.Generator().manual_seed(0)
    for shard in range(2):
        lengths = torch.randint(3, 9, (12,), generator=generator).tolist()
        prompts = [torch.randint(3, 96, (length,), generator=generator).tolist() for length in lengths]
        asked = [SampleRequest(tuple(ids), number, str(number), ()) for number, ids in enumerate(prompts)]
        found = sampler.sample(asked, temperature=1.0, max_new_tokens=12, on_tokens=lambda count: None)
        records = [
            SampleRecord(
                prompt_id=f"{shard}-{number}", task="any", template="any",
                split="select" if number % 4 == 0 else "train", seen_template=True, sample_index=0,
                temperature=1.0, seed=number, input_ids=[*ids, *one.tokens],
                completion_mask=[False] * len(ids) + [True] * len(one.tokens),
                finish_reason=one.finish_reason,
            )
            for number, (ids, one) in enumerate(zip(prompts, found, strict=True))
        ]  # fmt: skip
        write_shard(folder, shard, records, [one.signals for one in found if one.signals is not None])
    return folder


@pytest.fixture(scope="module")
def samples(directory: Path) -> Samples:
    return open_samples(directory)


def computed(target: Any, ids: list[int], layers: list[int]) -> torch.Tensor:
    with torch.no_grad():
        states = target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], dim=-1)


def test_they_are_what_the_target_computes_at_every_position_it_read(
    target: Target, samples: Samples
) -> None:
    assert samples.has_features and samples.has_signals
    for chosen in (samples, samples.where(split="select")):
        for index, record in enumerate(chosen):
            kept = chosen.signals(index)
            assert isinstance(kept, Signals) and kept.features is not None
            assert kept.features.shape == (len(record.input_ids) - 1, 96)
            assert len(kept) == record.completion_tokens
            wanted = computed(target.model, record.input_ids, LAYERS)[:-1]
            assert torch.allclose(kept.features, wanted, atol=1e-4)


def test_they_are_those_of_accepted_drafts_too() -> None:
    target, wanted = llama(0), requests(5, 20)
    engine = decoder(target, relative(target), 3, 2, keep_states=True)
    engine.runner.tap([0, 1])
    for request, output in zip(wanted, engine.generate(wanted), strict=True):
        features = computed(target, [*request.prompt, *output.tokens], [0, 1])[:-1]
        assert output.states.features is not None
        assert torch.allclose(output.states.features, features, atol=1e-4)
    assert 0 < engine.account.accepted < engine.account.drafted


def test_training_on_them_needs_no_forward_of_the_target_and_ends_alike(
    target: Target, samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, asked = train("eagle", target, bare(samples), tmp_path / "asked", tokens=60)
    monkeypatch.setattr(head_loss, "read_text", lambda *_: pytest.fail("the target was asked"))
    _, kept = train("eagle", target, samples, tmp_path / "kept", tokens=60, signal="features")
    assert all(torch.allclose(asked[name], kept[name], atol=1e-4) for name in asked)
    other = shifted(samples)
    _, wrong = train("eagle", target, other, tmp_path / "wrong", tokens=60, signal="features")
    assert not all(torch.allclose(asked[name], wrong[name], atol=1e-3) for name in asked)


def bare(samples: Samples) -> Samples:
    """Without features."""
    kept: Any = [samples.signals(index) for index in range(len(samples))]
    return Samples(samples.records, [(replace(one, features=None), 0) for one in kept])


def shifted(samples: Samples) -> Samples:
    """A mistake: each feature one position later."""
    kept: Any = [samples.signals(index) for index in range(len(samples))]
    moved = [replace(one, features=one.features.roll(1, dims=0)) for one in kept]
    return Samples(samples.records, [(one, 0) for one in moved], None, [0] * len(moved))


def test_padded_rows_get_their_own(target: Target, samples: Samples) -> None:
    batch = collate(samples, [3, 0, 7], pad_id=2)
    assert batch.signals is not None
    inputs: Any = {
        "input_ids": batch.input_ids, "attention_mask": batch.attention_mask,
        "completion_mask": batch.completion_mask, **batch.signals.tensors(),
    }  # fmt: skip
    model: Any = build("eagle", target).model
    told = head_loss.head_inputs(target.model, model, inputs, 1.0, True)
    for row, index in enumerate([3, 0, 7]):
        ids = samples.records[index].input_ids
        wanted = computed(target.model, ids, LAYERS)[:-1]
        assert told["features"] is not None
        assert torch.allclose(told["features"][row, : len(ids) - 1], wanted, atol=1e-4)
        assert not told["features"][row, len(ids) - 1 :].any()
    without = batch.without_tokens()
    assert without.signals is not None and len(without.signals) == 0
    assert without.signals.tensors()["features"].shape == batch.signals.tensors()["features"].shape


def test_samples_without_them_and_other_kinds_are_refused(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="signal is features but these samples carry no such"):
        train("eagle", target, make_samples(8), tmp_path, signal="features")
    with pytest.raises(UserError, match="only kind eagle reads other layers"):
        load_recipe("smoke", ["train.signal=features"])


def test_what_is_kept_decides_the_samples_key(tmp_path: Path) -> None:
    from distill.context import Run
    from distill.recipe import Recipe

    def key(recipe: Recipe) -> str:
        from contextlib import ExitStack

        with ExitStack() as stack:
            return Run(recipe, tmp_path, lambda text: None, stack).stages["sample"].key

    plain = recipe_of("eagle")
    kept = plain.model_copy(update={"train": plain.train.model_copy(update={"signal": "features"})})
    assert key(plain) != key(kept)
