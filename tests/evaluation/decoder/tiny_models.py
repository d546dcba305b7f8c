"""Random tiny models of several families, for tests of the decoder."""

import copy

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from evaluation.decoder.drafters import DraftModel
from evaluation.decoder.eagle import start_eagle
from evaluation.decoder.medusa import start_medusa

VOCAB = 48
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,  # wide, so that distributions are far from flat and argmaxes vary
}


def llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).eval()


def relative(model: PreTrainedModel, spread: float = 0.05, seed: int = 0) -> PreTrainedModel:
    """A model that often agrees with `model`: its weights with noise of `spread` times their own."""
    generator = torch.Generator().manual_seed(seed)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in copied.parameters():
            if weight.dim() > 1:
                weight += spread * weight.std() * torch.randn(weight.shape, generator=generator)
    return copied


def family(name: str, **changes: object) -> PreTrainedModel:
    """A tiny model of a family, with random weights."""
    torch.manual_seed(1)
    if name == "llama":
        return llama(1, **changes)
    if name == "smollm":  # Llama's modules with three groups of heads and one table of embeddings
        return llama(1, num_attention_heads=6, hidden_size=48, tie_word_embeddings=True, **changes)
    if name == "mistral":
        return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)).eval()
    if name == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)).eval()
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.4}
    return GPT2LMHeadModel(GPT2Config(**{"vocab_size": VOCAB, **shape, **changes})).eval()


FAMILIES = ("llama", "smollm", "mistral", "qwen2", "qwen3", "gpt2")


HEADS = ("medusa", "shared", "eagle")


def heads(
    kind: str, target: PreTrainedModel, vocab: torch.Tensor | None = None, spread: float = 0.1
) -> DraftModel:
    """Heads on the target, away from their start by noise of `spread` times their weights' own."""
    if kind == "eagle":
        torch.manual_seed(3)
        model = start_eagle(target, vocab, 4)
    else:
        model = start_medusa(target, vocab, 4, shared_head=kind == "shared")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight += spread * (weight.std() + 0.05) * noise
    return DraftModel(model.eval(), vocab)


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    """Ragged random prompts of 1 to 20 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 21, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
