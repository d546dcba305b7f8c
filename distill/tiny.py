"""Tiny random models, made in code: what `smoke` and the tests run every stage on, without a network or a
download.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 384
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Merges are learnt from these words: enough for prompts to shrink to a third of their bytes.
_CORPUS = [
    "Write the following as a JSON object with the keys name, date, city, price and number.",
    "Create a SQL table with columns and select the rows where the value is greater than ten.",
    "class Order: def __init__(self, name, price): self.name = name; return self.price",
    "Translate this sentence. Summarise the text. What is the answer to the question about the list?",
    '{"id": 1, "name": "text", "items": ["one", "two"], "total": 12.50} user assistant system message',
]


def make_tiny_pair(directory: Path, seed: int) -> tuple[Path, Path]:
    """Write two random Llamas with one byte-level tokenizer: a target and a smaller member of its family.

    The target has 4 layers of width 64, the family member 4 of width 32; both have 384 ids, float32 weights
    drawn from `seed`, a chat template and an end-of-sequence id. Returns their directories,
    `directory`/target and /family.
    """
    return make_tiny_target(directory / "target", seed), _make_model(directory / "family", seed + 1, width=32)


def make_tiny_target(directory: Path, seed: int) -> Path:
    """Write the target of `make_tiny_pair` alone, as "random:SEED" in a recipe asks for; returns
    `directory`.
    """
    return _make_model(directory, seed, width=64)


def _make_model(directory: Path, seed: int, width: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from distill.models import without_bars

    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,  # the usual 0.02 makes logits so flat that every token is a near tie
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    with without_bars():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _tokenizer() -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core: Any = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        model_max_length=2048,
    )
