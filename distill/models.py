"""Load a target or a drafter, save a drafter: safetensors only, code from a hub never."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from data.errors import UserError
from data.files import replace_directory, write_json
from distill.model_files import (
    check_finite,
    check_ids,
    out_of_memory,
    read_config,
    read_generation_eos,
    read_tokenizer,
    read_weights,
    reading,
)
from distill.quantize import Quantization, check_here, loading_options
from distill.resolve import model_digest, resolve_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from evaluation.decoder.drafters import DraftModel

_DRAFT_VOCAB = "draft_vocab.json"
_HEAD_TOLERANCE = {2: 0.03, 4: 1e-3, 8: 1e-3}  # of the largest logit, by bytes of a number
_LOGIT_SETTINGS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
)


class TargetConfig(BaseModel):
    """Which target, and the dtype it is run in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    """Hub id, local directory, local GGUF file, `package:PACKAGE/FILE.gguf`, or `random:SEED` (tiny, for
    tests)."""
    revision: str | None = None
    """Commit, tag or branch on the hub; for hub ids only."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    quantization: Quantization = "none"
    """`nf4` or `int8`: its layers' weights as bitsandbytes rounds them. That is another target than the full
    one: it is sampled, distilled from and measured as such."""

    @property
    def name(self) -> str:
        """The target as experiments, reports and exports name it."""
        return self.model if self.quantization == "none" else f"{self.model} ({self.quantization})"


@dataclass
class Target:
    """A loaded target: frozen, in evaluation mode, on its device."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    pad_id: int
    digest: str
    """Changes when the weights, the config or the tokenizer change: the hub commit, or a hash of the
    files."""
    name: str
    folder: Path | None = None
    """The model's files."""
    quantized: bool = False
    """Are its layers' weights rounded, so that no drafter can be cut out of them?"""


def load_target(config: TargetConfig, cache_dir: Path, device: torch.device | str) -> Target:
    """Load the target and its tokenizer, frozen; `UserError` says what is missing and where."""
    import torch

    path = resolve_model(config.model, config.revision, cache_dir)
    dtype = getattr(torch, config.dtype)
    check_here(config.quantization, "adamw", torch.cuda.is_available())
    model = load_model(path, dtype, loading_options(config.quantization, dtype, device))
    tokenizer = read_tokenizer(path)
    eos_ids = read_eos_ids(path, tokenizer)
    model.requires_grad_(False).eval()
    quantized = config.quantization != "none"
    if not quantized:  # the other one is on its device, and refuses to be moved
        with _enough_memory(path, f"on {device}"):
            model.to(device)
    check_head(model, config.model)
    return Target(
        model=model,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        pad_id=_pad_id(model, tokenizer, eos_ids),
        digest=model_digest(path, cache_dir),
        name=config.name,
        folder=path,
        quantized=quantized,
    )


def load_model(
    path: Path, dtype: torch.dtype | Literal["auto"], options: dict[str, Any] | None = None
) -> PreTrainedModel:
    """The causal LM in a local directory, from safetensors; `UserError` where its weights are not those of
    its config (transformers would fill what is missing with random numbers). `options` go to transformers."""
    from transformers import AutoModelForCausalLM

    with without_bars(), reading(path, "model (config and weights)"), _enough_memory(path, "here"):
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told in the info, and refused below with their names
            **(options or {}),
        )
    wrong = [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]
    if wrong:
        raise UserError(
            f"The weights in {path} do not fit its config.json: {', '.join(sorted(wrong)[:3])} ..."
        )
    check_finite(model, path)
    return model


@contextlib.contextmanager
def _enough_memory(path: Path, where: str) -> Iterator[None]:
    """Say how large the model in `path` is where memory ends in here."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        size = sum(file.stat().st_size for file in path.glob("*.safetensors")) / (1 << 30)
        raise UserError(
            f"There is not enough memory {where} for the model in {path}: its weights alone take {size:.1f} "
            "GiB as saved. Choose a smaller one, a narrower target.dtype or a larger machine; "
            "`distill preflight` says what a recipe needs."
        ) from error


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """No progress bars of transformers in here: loading and saving take a second, and the command line shows
    its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def check_head(model: PreTrainedModel, name: str) -> None:
    """Refuse a model that does more to its logits than `evaluation.head.head_of` knows.

    Signals, losses and acceptance multiply hidden states with the head, and what they left out would spoil
    them silently. So both are computed for a few ids. Raises `UserError` that names the model.
    """
    import torch

    from evaluation.head import head_of

    ids = torch.arange(min(4, model.get_input_embeddings().weight.shape[0]), device=model.device)[None]
    with torch.no_grad():
        states = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        found = head_of(model).logits(states)
        wanted = model(input_ids=ids, use_cache=False).logits.float()
    tolerance = _HEAD_TOLERANCE[states.dtype.itemsize] * wanted.abs().max()
    if found.shape != wanted.shape or (found - wanted).abs().max() > tolerance:
        config = model.config.get_text_config()
        named = [key for key in _LOGIT_SETTINGS if getattr(config, key, None) not in (None, 1, 1.0)]
        raise UserError(
            f"{name} ({type(model).__name__}): its logits are not what its head and the settings of its "
            f"config.json ({', '.join(named) or 'none known here'}) make of its hidden states, so it cannot "
            "be distilled from them; choose a model of another kind."
        )


def save_drafter(
    drafter: DraftModel, directory: Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write the drafter as a Hugging Face directory, whole or not at all; an older one is replaced.

    The names are transformers' own. `config.json` keeps the full vocabulary (the embeddings have it); with a
    reduced vocabulary `lm_head.weight` is [Vd, H] and `draft_vocab.json` lists the target id of each row.
    """

    def write(folder: Path) -> None:
        with without_bars():
            drafter.model.save_pretrained(folder)
        if drafter.vocab is not None:
            write_json(folder / _DRAFT_VOCAB, drafter.vocab.tolist())
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    replace_directory(directory, write)


def load_drafter(directory: Path, device: torch.device | str) -> DraftModel:
    """Read what `save_drafter` wrote, bit for bit, in evaluation mode, or a public checkpoint of Medusa or
    EAGLE-3 heads; `UserError` when it is not such a directory."""
    from distill.head_layouts import from_public
    from evaluation.decoder.drafters import DraftModel
    from evaluation.decoder.kinds import kind_of

    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise UserError(f"There is no drafter in {directory}: config.json is missing.")
    vocab_file = directory / _DRAFT_VOCAB
    config = read_config(directory)
    vocab = None
    if vocab_file.is_file():
        with reading(directory, vocab_file.name):
            vocab = read_vocab(json.loads(vocab_file.read_text()), config.vocab_size, vocab_file)
    elif kind_of(config) == "model":
        return DraftModel(load_model(directory, "auto").eval().to(device), None)
    with reading(directory, "config.json"):
        model = empty_model(config, head_rows=None if vocab is None else len(vocab))
    weights = _read_weights(directory)
    if kind_of(config) != "model":
        weights, told = from_public(weights)
        if told is not None and len(told) < config.vocab_size:
            vocab = read_vocab(told.tolist(), config.vocab_size, directory)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing or unexpected:
        raise UserError(
            f"The weights in {directory} do not fit its config.json: "
            f"missing {missing[:3]}, unknown {unexpected[:3]}."
        )
    check_finite(model, directory)
    return DraftModel(model.eval().to(device), None if vocab is None else vocab.to(device))


def empty_model(config: Any, head_rows: int | None = None) -> PreTrainedModel:
    """A causal LM of `config` in its dtype whose weights are uninitialised, with a head of `head_rows` rows;
    for the config of a head on the target (Medusa, EAGLE), such a one.

    Not on the meta device, where the rotary buffers, which no checkpoint holds, would stay without values.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from evaluation.decoder.kinds import head_model, kind_of

    with no_init_weights():
        if kind_of(config) != "model":
            head = head_model(config)
            cast_parameters(head, config.dtype or torch.float32)
            return head
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
        if head_rows is not None:
            model.lm_head = torch.nn.Linear(config.hidden_size, head_rows, bias=False, dtype=model.dtype)
    return model


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Change the dtype of the parameters alone: `model.to(dtype)` would round the rotary buffers too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def read_eos_ids(path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The end-of-sequence ids of the model in a local directory, without its weights."""
    config = read_config(path)
    text = config.get_text_config()
    eos_ids = _eos_ids(read_generation_eos(path), text.eos_token_id, tokenizer.eos_token_id)
    check_ids(eos_ids, text.vocab_size, f"{path}: the end-of-sequence setting (eos_token_id)")
    return eos_ids


def _eos_ids(*candidates: int | list[int] | None) -> tuple[int, ...]:
    for found in candidates:
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    raise UserError(
        "The target names no end-of-sequence token in generation_config, config or tokenizer, so no answer "
        "would end: set eos_token_id in its generation_config.json."
    )


def _pad_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos_ids: tuple[int, ...]) -> int:
    for found in (tokenizer.pad_token_id, model.generation_config.pad_token_id, model.config.pad_token_id):
        if found is not None:
            return int(found)
    return eos_ids[0]


def read_vocab(ids: list[int], vocab_size: int, file: Path) -> torch.Tensor:
    """The draft vocabulary int64 [Vd] that `file` lists; `UserError` where it is none."""
    import torch

    vocab = torch.tensor(ids, dtype=torch.int64)
    rising = vocab.dim() == 1 and len(vocab) > 0 and bool((vocab[1:] > vocab[:-1]).all())
    if not rising or vocab[0] < 0 or vocab[-1] >= vocab_size:
        raise UserError(f"{file} must be a rising list of ids below {vocab_size}, without repeats.")
    return vocab


def _read_weights(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"There is no drafter in {directory}: no safetensors file.")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights.update(read_weights(file))
    return weights
