"""Targets that scale, cap or shift their logits, from sampling to acceptance: tiny random models of each."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from data.engines import SampleRequest
from data.errors import UserError
from data.records import SampleRecord, Samples, open_samples, write_shard
from distill import chunked
from distill.compatibility import check_compatibility
from distill.drafter import DraftConfig, InitConfig, build_drafter
from distill.models import Target, check_head, load_target, save_drafter
from distill.models import TargetConfig as Config
from distill.pipeline import run
from distill.recipe import load_recipe
from distill.train import TrainConfig, train_drafter
from evaluation.acceptance import teacher_forced
from evaluation.decoder.drafters import DraftModel, ModelDrafter
from evaluation.decoder.engine import Decoder, Request
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampler import BuiltinSampler
from evaluation.decoder.sampling import SamplingOptions
from evaluation.head import Head, head_of
from tests.distill.conftest import EOS, VOCAB, tiny_tokenizer

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
FULL = "full_attention"  # a real Gemma 2 has sliding layers too, which the decoder refuses by name


def made(name: str, seed: int = 0, layers: int = 3, vocab_size: int = VOCAB) -> PreTrainedModel:
    """A tiny model of that family; its logits are far from those of the bare product."""
    common = {**COMMON, "vocab_size": vocab_size, "num_hidden_layers": layers}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if name == "cohere":
            return CohereForCausalLM(CohereConfig(**common, logit_scale=0.25)).float().eval()
        if name == "granite":
            return GraniteForCausalLM(GraniteConfig(**common, logits_scaling=4.0)).float().eval()
        if name == "gemma2":
            config = Gemma2Config(
                **common,
                head_dim=8,
                final_logit_softcapping=2.0,
                layer_types=[FULL] * layers,
            )
            return Gemma2ForCausalLM(config).float().eval()
        model = PhiForCausalLM(PhiConfig(**common)).float().eval()
        torch.nn.init.normal_(model.lm_head.bias)
        return model


@pytest.fixture(params=["cohere", "granite", "gemma2", "phi"])
def target(request: pytest.FixtureRequest) -> Target:
    model = made(request.param).requires_grad_(False)
    return Target(model, tiny_tokenizer(), (EOS,), EOS, "digest", request.param)


@pytest.fixture
def samples(target: Target, tmp_path: Path) -> Samples:
    """Sampled from the target by our own decoder, with its signals."""
    prompts = [list(range(3 + index, 8 + index)) for index in range(12)]
    sampler = BuiltinSampler(
        target.model, eos_ids=target.eos_ids, batch_size=6, max_length=64, signal_temperature=1.0
    )
    requests = [SampleRequest(prompt, seed) for seed, prompt in enumerate(prompts)]
    done = sampler.sample(requests, temperature=1.0, max_new_tokens=9, on_tokens=lambda count: None)
    records = [
        SampleRecord(
            prompt_id=f"p{index}",
            task="json",
            template="t",
            split="select" if index % 4 == 0 else "train",
            seen_template=True,
            sample_index=0,
            temperature=1.0,
            seed=index,
            input_ids=[*prompt, *found.tokens],
            completion_mask=[*([False] * len(prompt)), *([True] * len(found.tokens))],
            finish_reason=found.finish_reason,
        )
        for index, (prompt, found) in enumerate(zip(prompts, done, strict=True))
    ]
    write_shard(tmp_path, 0, records, [found.signals for found in done])
    return open_samples(tmp_path)


def test_a_head_gives_the_models_own_logits(target: Target) -> None:
    check_head(target.model, target.name)
    head = head_of(target.model)
    assert not head.plain
    ids = torch.arange(20, 32)[None]
    states = target.model.get_decoder()(input_ids=ids).last_hidden_state
    wanted = target.model(input_ids=ids).logits
    torch.testing.assert_close(head.logits(states), wanted, rtol=1e-4, atol=1e-5)
    some = torch.tensor([5, 7, 90])
    torch.testing.assert_close(head.rows(some).logits(states), wanted[..., some], rtol=1e-4, atol=1e-5)
    bare = Head(head.weight_VH).logits(states)
    assert (bare - wanted).abs().max() > 0.5  # the negative control


def test_sampling_keeps_signals_of_the_models_own_logits(target: Target, samples: Samples) -> None:
    for index in range(3):
        record, told = samples[index], samples.signals(index)
        logits = target.model(input_ids=torch.tensor([record.input_ids])).logits[0]
        wanted = logits[:-1][torch.tensor(record.completion_mask[1:])]
        torch.testing.assert_close(told.logsumexp, wanted.logsumexp(-1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head_of(target.model).logits(told.hidden), wanted, rtol=1e-4, atol=1e-4)


def test_the_decoder_writes_what_the_model_writes(target: Target) -> None:
    """Greedily, beside transformers' own; and the target as its own drafter is accepted whole."""
    runner = Runner(target.model, 1, 64)
    options = SamplingOptions(temperature=0.0)
    drafter = ModelDrafter(DraftModel(target.model), runner, options)
    decoder = Decoder(runner, eos_ids=(), options=options, drafter=drafter, num_speculative_tokens=3)
    (found,) = decoder.generate([Request([5, 6, 7, 8], 16)])
    wanted = target.model.generate(
        torch.tensor([[5, 6, 7, 8]]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=EOS
    )
    assert found.tokens == wanted[0, 4:].tolist()
    assert decoder.account.accepted == decoder.account.drafted > 0


def start_of(target: Target, tmp_path: Path) -> DraftModel:
    """A drafter of the target: cut out of it with a reduced vocabulary, or a family member where it cannot
    be cut."""
    counts = torch.arange(VOCAB).flip(0)
    if target.name == "phi":
        folder = tmp_path / "family"
        made("phi", seed=1, layers=1).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        config = DraftConfig(init=InitConfig(**{"from": str(folder)}))
    else:
        config = DraftConfig(init=InitConfig(layers=[0, 2]), vocab_size=48)
    return build_drafter(config, target, counts, tmp_path, lambda name: Path(name))


def test_live_equals_hidden_and_the_target_accepts_itself(
    target: Target, samples: Samples, tmp_path: Path
) -> None:
    histories = []
    for signal in ("hidden", "live"):
        given = samples if signal == "hidden" else Samples(samples.records, None)
        drafter = start_of(target, tmp_path)
        assert not head_of(drafter.model).plain
        config = TrainConfig(tokens=120, learning_rate=3e-3, batch_size=4, signal=signal)  # type: ignore[arg-type]
        found = train_drafter(
            drafter,
            target,
            given,
            config,
            temperature=1.0,
            seed=0,
            out_dir=tmp_path / signal,
            report=lambda *_: None,
            metric="sampled",
        )
        histories.append(found.history)
    for one, two in zip(*histories, strict=True):
        assert one == pytest.approx(two, abs=1e-3)
    assert histories[0][-1] != histories[0][0]
    own = teacher_forced(
        DraftModel(target.model), head_of(target.model), samples, temperature=1.0, batch_size=8
    ).means()
    assert own["sampled"] == pytest.approx(1, abs=1e-4) and own["greedy"] > 0.99
    bare = Head(head_of(target.model).weight_VH)  # the negative control
    wrong = teacher_forced(DraftModel(target.model), bare, samples, temperature=1.0, batch_size=8).means()
    assert wrong["sampled"] < 0.95 or wrong["argmax"] != pytest.approx(own["argmax"], abs=1e-2)


def test_the_loss_knows_the_heads_of_both(
    target: Target, samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the trainer hands to the loss: forward KL written out from the models' own logits."""
    sums: list[float] = []
    real = chunked.chunked_loss

    def kept(*arguments: Any, **settings: Any) -> Any:
        found = real(*arguments, **settings)
        sums.append(float(found.loss.detach()))
        return found

    monkeypatch.setattr("distill.training_step.chunked_loss", kept)
    drafter = start_of(target, tmp_path)
    first = samples[1]
    one = Samples([samples.records[0], first], [samples.locations[0], samples.locations[1]])  # type: ignore[index]
    ids, mask = torch.tensor([first.input_ids]), torch.tensor(first.completion_mask[1:])
    with torch.no_grad():
        theirs = target.model(input_ids=ids).logits[0, :-1][mask].log_softmax(-1)
        ours = drafter.model(input_ids=ids).logits[0, :-1][mask].log_softmax(-1)
    theirs = theirs if drafter.vocab is None else theirs[:, drafter.vocab]
    mass = theirs.exp().sum(-1)
    wanted = ((theirs.exp() * (theirs - ours)).sum(-1) - mass * mass.log()).sum()
    config = TrainConfig(tokens=1, learning_rate=1e-3, batch_size=1)
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 0, "report": lambda *_: None}
    train_drafter(drafter, target, one, config, out_dir=tmp_path / "out", **settings)
    assert sums[0] == pytest.approx(float(wanted), rel=1e-3)


def test_heads_on_such_a_target_are_refused(target: Target, tmp_path: Path) -> None:
    config = DraftConfig(kind="medusa", heads=2)
    with pytest.raises(UserError, match=rf"{target.name} scales, caps or shifts.*choose kind model"):
        build_drafter(config, target, torch.ones(VOCAB).long(), tmp_path, lambda name: Path(name))


def test_they_are_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    recipe = load_recipe("smoke", ["draft={kind: medusa, heads: 4}", "export.formats=[medusa]"])
    for name, refused in (("cohere", True), ("gemma2", True), ("granite", True), ("phi", False)):
        config = made(name).config
        config.max_position_embeddings = 2048
        config.save_pretrained(tmp_path / name)
        with pytest.raises(UserError, match="scales or caps") if refused else nullcontext():
            check_compatibility(recipe, tmp_path / name, None)


def test_a_head_with_a_bias_is_not_cut(tmp_path: Path) -> None:
    target = Target(made("phi"), tiny_tokenizer(), (EOS,), EOS, "digest", "phi")
    config = DraftConfig(init=InitConfig(layers=[0]))
    with pytest.raises(UserError, match="PhiForCausalLM, which is not laid out like Llama"):
        build_drafter(config, target, torch.ones(VOCAB).long(), tmp_path, lambda name: Path(name))
    biased = made("cohere")
    biased.lm_head = torch.nn.Linear(32, VOCAB, bias=True)
    with pytest.raises(UserError, match="has a bias, which a cut head would lose"):
        build_drafter(
            config, dataclasses.replace(target, model=biased), torch.ones(VOCAB).long(), tmp_path, Path
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cohere", "gemma2", "phi"])
def test_the_whole_pipeline(name: str, tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    """Sampling, training, evaluation, selection and export, which proves its own files."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_pair[0])
    folders = []
    for seed, which in enumerate(("target", "family")):
        model = made(name, seed, layers=3 - seed, vocab_size=len(tokenizer))
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.config.max_position_embeddings = 2048
        save_drafter(DraftModel(model), tmp_path / which, tokenizer)
        folders.append(tmp_path / which)
    start = (
        f"draft.init={{from: {folders[1]}}}" if name == "phi" else "draft.init={from: target, layers: [0, 2]}"
    )
    settings = [
        f"target.model={folders[0]}",
        start,
        f"draft.vocab_size={'null' if name == 'phi' else 128}",
        "sample.tokens=400",
        "train.tokens=400",
        "evaluate={prompts: 2, num_speculative_tokens: [2], max_new_tokens: 6}",
        "data.prompts=[{source: builtin:structured, count: 120}]",
        "export.formats=[hf]",
    ]
    result = run(load_recipe("smoke", settings), tmp_path / "runs", "run", fresh=False, say=lambda text: None)
    evaluation = result.read("evaluate", "evaluation.json")
    assert evaluation is not None
    rows = [row for row in evaluation["decode"] if row["drafter"] == "model"]
    assert rows and all(row["bugs"] == 0 for row in rows)
    target = load_target(Config(model=str(folders[0])), tmp_path, "cpu")
    assert not head_of(target.model).plain
