"""Read the files of a model that someone else made: config, tokenizer, weights.

They come from a hub or a user's disk, so anything may be wrong with them, and transformers raises whatever
its parsers do. Here every such fault becomes one sentence that names the folder and the file to mend. Code
that comes with a model is never run, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LONGEST_REASON = 200
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


@contextlib.contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Raise a `UserError` that says that `what` in the folder `path` cannot be read, whatever goes wrong.

    Memory that ends is no fault of the files: that error goes on as it is.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            raise UserError(
                f"{path}: its {what} asks for Python code that comes with the model, which is never run: "
                "choose a model that transformers knows by itself."
            ) from error
        if len(reason) > _LONGEST_REASON:
            reason = reason[: _LONGEST_REASON - 3] + "..."
        raise UserError(
            f"{path}: its {what} cannot be read ({type(error).__name__}: {reason}); "
            "download or save it again (in runs/cache: delete the folder)."
        ) from error


def out_of_memory(error: BaseException) -> bool:
    """Does the error say that there is not enough memory, on the machine or its GPU?"""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def read_config(path: Path) -> Any:
    """The transformers config in a local directory. Raises `UserError` where it cannot be read."""
    from transformers import AutoConfig

    with reading(path, "config.json"):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a local directory. Raises `UserError` where there is none or it cannot be read."""
    from transformers import AutoTokenizer

    with reading(path, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if not tokenizer.get_vocab():
        raise UserError(f"{path} holds no tokenizer files; save them with the tokenizer's save_pretrained.")
    return tokenizer


def read_generation_eos(path: Path) -> int | list[int] | None:
    """The end-of-sequence ids that generation_config.json names; None without such a file."""
    from transformers import GenerationConfig

    if not (path / "generation_config.json").is_file():
        return None
    with reading(path, "generation_config.json"):
        found: int | list[int] | None = GenerationConfig.from_pretrained(path).eos_token_id
        return found


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file. Raises `UserError` where it is cut off or none."""
    from safetensors.torch import load_file

    with reading(file.parent, file.name):
        return load_file(file)


def check_finite(model: PreTrainedModel, path: Path) -> None:
    """Raise `UserError` that names a tensor with NaN or infinities: such a model answers but rubbish."""
    import torch

    for name, value in model.state_dict().items():
        if value.is_floating_point() and value.numel() and not value.is_meta:
            if not all(bound.isfinite() for bound in torch.aminmax(value)):
                raise UserError(
                    f"{path}: the weights {name} hold NaN or infinities; "
                    "download the model again, or load it in a wider dtype."
                )


def check_ids(ids: Sequence[int], vocab_size: int, what: str) -> None:
    """Raise `UserError` where `what` names an id that the model's `vocab_size` embeddings do not have."""
    beyond = next((token for token in ids if not 0 <= token < vocab_size), None)
    if beyond is not None:
        raise UserError(f"{what} names id {beyond}, but the model has ids 0 to {vocab_size - 1} only.")
