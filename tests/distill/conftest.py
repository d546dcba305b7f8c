"""Tiny random models and samples, made in memory, for the training tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.records import SampleRecord, Samples, open_samples, write_shard
from data.signals import Signals
from distill.models import Target
from evaluation.signals import target_signals

VOCAB = 96
EOS = 2  # and pad, as in SmolLM2


def tiny_llama(seed: int, *, hidden: int = 32, layers: int = 4, tied: bool = True) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float().eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {f"w{index}": index for index in range(VOCAB)}
    core: Any = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="w1", eos_token="w2", pad_token="w2")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def target() -> Target:
    model = tiny_llama(0).requires_grad_(False)
    return Target(model, tiny_tokenizer(), (EOS,), EOS, "digest", "tiny")


@pytest.fixture(scope="session")
def make_samples(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Samples]:
    """Samples on disk: random prompts, continued greedily by the target, an EOS at the end of every second
    one."""

    def make(count: int = 40, *, signals: bool = True, temperature: float = 1.0, seed: int = 0) -> Samples:
        generator = torch.Generator().manual_seed(seed)
        records = []
        for index in range(count):
            prompt = torch.randint(
                3, VOCAB, (1, int(torch.randint(3, 9, (1,), generator=generator))), generator=generator
            )
            new = int(torch.randint(4, 12, (1,), generator=generator))
            ids = target.model.generate(
                prompt, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=EOS
            )
            tokens = ids[0].tolist()
            if index % 2 == 0:
                tokens[-1] = EOS
            records.append(
                SampleRecord(
                    prompt_id=f"p{index}",
                    task="json" if index % 3 else "sql",
                    template=f"t{index % 4}",
                    split="select" if index % 5 == 0 else "train",
                    seen_template=index % 4 != 0,
                    sample_index=0,
                    temperature=0.0,
                    seed=index,
                    input_ids=tokens,
                    completion_mask=[position >= prompt.shape[1] for position in range(len(tokens))],
                    finish_reason="stop" if index % 2 == 0 else "length",
                )
            )
        directory = tmp_path_factory.mktemp("samples")
        write_shard(
            directory,
            0,
            records,
            [_signals(target, record, temperature) for record in records] if signals else None,
        )
        return open_samples(directory)

    return make


def _signals(target: Target, record: SampleRecord, temperature: float) -> Signals:
    from data.records import collate

    return target_signals(target.model, collate(Samples([record], None), [0], EOS), temperature)


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., LlamaForCausalLM]:
    return tiny_llama
