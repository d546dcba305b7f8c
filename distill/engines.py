"""The sampling engine that a recipe names, made for its target.

Engines that sample elsewhere get the target's tokenizer and configuration alone: its weights are not loaded
for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.engines import Completion, Failure, SampleRequest, SamplingEngine
from data.openai_api import AnswerReader
from data.records import read_records, shard_path
from data.sample import SampleConfig, plan
from data.signals import Signals, TopK
from distill.identity import model_form
from distill.model_files import read_config

if TYPE_CHECKING:
    from distill.context import Run
    from evaluation.decoder.drafters import DraftModel


@dataclass
class Kept:
    """An engine whose completions keep their signals in another form."""

    engine: SamplingEngine
    form: Callable[[Signals], Signals | TopK]

    @property
    def gains(self) -> list[Any]:
        """Of the engine's drafter, where it has one."""
        return getattr(self.engine, "gains", [])

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_new_tokens: int,
        on_tokens: Callable[[int], None],
    ) -> Sequence[Completion | Failure]:
        """See `data.engines.SamplingEngine`."""
        completions = self.engine.sample(
            requests, temperature=temperature, max_new_tokens=max_new_tokens, on_tokens=on_tokens
        )
        for completion in completions:
            if isinstance(completion, Completion) and isinstance(completion.signals, Signals):
                completion.signals = self.form(completion.signals)
        return completions


@dataclass
class EngineOnDemand:
    """An engine that is made when it is first asked: where every shard is there, no target is loaded."""

    make: Callable[[], SamplingEngine]
    made: SamplingEngine | None = None

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_new_tokens: int,
        on_tokens: Callable[[int], None],
    ) -> Sequence[Completion | Failure]:
        """See `data.engines.SamplingEngine`."""
        self.made = self.made or self.make()
        return self.made.sample(
            requests, temperature=temperature, max_new_tokens=max_new_tokens, on_tokens=on_tokens
        )


def can_share(config: SampleConfig) -> bool:
    """Can several processes share a sampling? Only our own decoder's: a server works in parallel already, and
    a drafter's gain is measured over one sequence of shards.
    """
    return config.engine == "builtin" and config.drafter is None


def make_engine(run: Run, folder: Path) -> SamplingEngine:
    """The engine of `run`'s recipe for the sampling stage in `folder`.

    Raises `UserError` where what the engine needs is not there; the engine `batch` also where a file has to
    be filled in first.
    """
    config = run.recipe.sample
    max_length = run.recipe.data.max_prompt_tokens + config.max_new_tokens
    if config.engine == "openai":
        from data.endpoint import EndpointEngine

        assert config.endpoint is not None
        return EndpointEngine(config.endpoint, answer_reader(run))
    if config.engine == "batch":
        from data.batch_file import BatchFileEngine

        assert config.endpoint is not None
        engine = BatchFileEngine(folder / "batch", config.endpoint, answer_reader(run))
        engine.hand_off(planned_shards(run, folder), config.max_new_tokens, config.tokens)
        return engine
    if config.engine == "vllm":
        from data.vllm_engine import VllmConfig, VllmEngine

        return VllmEngine(
            run.target_folder,
            run.recipe.target.dtype,
            config.vllm or VllmConfig(),
            max_length=max_length,
            eos_ids=run.eos_ids,
        )
    shape: dict[str, Any] = {
        "eos_ids": run.target.eos_ids,
        "batch_size": config.batch_size,
        "max_length": max_length,
        "signal_temperature": run.kept_signal_temperature,
        "layers": _kept_layers(run),
    }
    return kept(run, _own_decoder(run, shape))


def kept(run: Run, engine: SamplingEngine) -> SamplingEngine:
    """`engine`, with its signals in the form that the recipe trains on."""
    from evaluation.head import head_of
    from evaluation.signals import in_half, top_k_of

    train = run.recipe.train
    if train.signal == "hidden_half":
        return Kept(engine, in_half)
    if train.signal == "topk":
        head = head_of(run.target.model).detached()
        return Kept(
            engine, partial(top_k_of, head_VH=head, count=train.top_k, temperature=run.signal_temperature)
        )
    return engine


def _kept_layers(run: Run) -> list[int]:
    """The target's layers whose inputs are kept for training."""
    from evaluation.decoder.eagle import feature_layers

    if run.recipe.train.signal != "features":
        return []
    return feature_layers(run.target.model.config.get_text_config().num_hidden_layers)


def _own_decoder(run: Run, shape: dict[str, Any]) -> SamplingEngine:
    config = run.recipe.sample
    if run.sampling_drafter_folder is not None:
        from distill.self_acceleration import SpeculativeSampler

        drafter = sampling_drafter(run, run.sampling_drafter_folder)
        return SpeculativeSampler(run.target.model, drafter, config.num_speculative_tokens, **shape)
    from evaluation.decoder.sampler import BuiltinSampler

    return BuiltinSampler(run.target.model, **shape)


def sampling_drafter(run: Run, folder: Path) -> DraftModel:
    """The drafter of `sample.drafter`, on the target's device."""
    from distill.drafter import read_drafter
    from distill.models import load_drafter

    name = run.recipe.sample.drafter
    assert name is not None
    if model_form(name) == "candidate":
        return load_drafter(folder, run.device)
    return read_drafter(folder, name, run.target, "sample.drafter")


def answer_reader(run: Run) -> AnswerReader:
    """Reads the answers of a server in the words of `run`'s target."""
    tokenizer, eos_ids = run.tokenizer, run.eos_ids
    model = read_config(run.target_folder).get_text_config()

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    own = tokenizer.eos_token_id
    return AnswerReader(encode, eos_ids, own if own in eos_ids else eos_ids[0], model.vocab_size)


def planned_shards(run: Run, folder: Path) -> Iterator[tuple[bool, int, list[tuple[SampleRequest, float]]]]:
    """Of each planned shard whether it is of the training split, its completion tokens where `folder` has it
    (0 where not), and what is missing: its requests with their temperatures.
    """
    config = run.recipe.sample
    for index, shard in enumerate(plan(run.prompts, config, held_out=run.held_out, seed=run.recipe.seed)):
        path, training = shard_path(folder, index), shard[0].prompt.split == "train"
        if path.exists():
            yield training, sum(record.completion_tokens for record in read_records(path)), []
        else:
            yield training, 0, [(planned.request, planned.temperature) for planned in shard]
