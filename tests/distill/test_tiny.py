"""The tiny models: the same from the same seed, loadable like any other, with all that a target needs."""

from pathlib import Path

from data.files import sha256_file
from distill.tiny import VOCAB_SIZE, make_tiny_pair


def test_pair_is_reproducible_and_complete(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    again = make_tiny_pair(tmp_path, seed=3)
    other = make_tiny_pair(tmp_path / "other", seed=4)
    for first, second, third in zip(tiny_pair, again, other, strict=True):
        weights = [sha256_file(folder / "model.safetensors") for folder in (first, second, third)]
        assert weights[0] == weights[1] != weights[2]
    target, family = (AutoModelForCausalLM.from_pretrained(folder) for folder in tiny_pair)
    assert (target.config.hidden_size, family.config.hidden_size) == (64, 32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair[0])
    assert len(tokenizer) == VOCAB_SIZE == target.config.vocab_size
    assert target.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(tiny_pair[1]).get_vocab()


def test_tokenizer_keeps_any_text_and_knows_turns(tiny_pair: tuple[Path, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_pair[0])
    text = 'Zażółć {"a": [1, 2]}\n\t\u2713'
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert turn == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(turn)["input_ids"].count(tokenizer.eos_token_id) == 1
