"""Where a recipe's model is: its name to a local Hugging Face directory, downloaded or converted once.

A model is named by a hub id, a local directory or GGUF file, or `package:PACKAGE/FILE.gguf`, a GGUF that an
installed Python package carries. A GGUF is read once (half a minute) and kept as an ordinary Hugging Face
directory in the cache.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import canonical_hash, replace_directory, sha256_file, user_path, write_json
from distill.identity import model_form

SHIPPED = Path(__file__).resolve().parent.parent / "recipes" / "drafters"
"""The drafters that come with the project: `shipped:NAME`."""
_PACKAGE_PREFIX = "package:"
_DIGESTS = "digests.json"  # in the cache: sha256 of large files, with the size, times and inode they had
_KEPT_BYTES = 1 << 24  # smaller files are read again in no time
_SETTLED_NS = 2_000_000_000
_CONVERTED = "converted.json"  # the last file of a converted GGUF: the digests of the others
_HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]
_DIGEST_SUFFIXES = {".json", ".jinja", ".model", ".safetensors", ".txt"}


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
    if form == "shipped":
        return _shipped(model.removeprefix("shipped:"), what)
    if (gguf := gguf_file(model, what)) is not None:
        return _converted(gguf, Path(cache_dir), what)
    path = user_path(model)
    if not path.is_dir():
        raise UserError(f"{what}: there is no directory {path}, and {model!r} is no hub id.")
    if not (path / "config.json").is_file():
        raise UserError(f"{what}: {path} holds no config.json, so it is no Hugging Face model directory.")
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{what}: {path} holds no safetensors weights; save them with save_pretrained.")
    return path


def find_model(model: str, revision: str | None, cache_dir: Path) -> Path | None:
    """The directory that `resolve_model` would give, where it is on this machine already; downloads and
    converts nothing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    form = model_form(model)
    try:
        if form == "hub":
            snapshot = Path(snapshot_download(model, revision=revision, local_files_only=True))
            return snapshot if missing_weights(snapshot) is None else None
        if form == "random":
            path = cache_dir / f"random-{model.removeprefix('random:')}"
        elif form == "shipped":
            path = SHIPPED / model.removeprefix("shipped:")
        elif (gguf := gguf_file(model)) is not None:
            path = _converted_path(gguf, cache_dir)
        else:
            path = user_path(model)
    except (UserError, HFValidationError, LocalEntryNotFoundError):
        return None
    return path if (path / "config.json").is_file() else None


def missing_weights(snapshot: Path) -> str | None:
    """A weights file that a hub snapshot lacks, as a download that was cut off leaves it; None where all are
    there.
    """
    indices = sorted(snapshot.glob("*.safetensors.index.json"))
    if not indices:
        return None if any(snapshot.glob("*.safetensors")) else "model.safetensors"
    try:
        named = {name for index in indices for name in json.loads(index.read_text())["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return indices[0].name
    return next((name for name in sorted(named) if not (snapshot / name).is_file()), None)


def gguf_file(model: str, what: str = "target.model") -> Path | None:
    """The GGUF file that `model` names, inside a package or by its path; None where it names none.

    Raises `UserError` when the package or the file is not there.
    """
    form = model_form(model)
    if form not in ("package", "local"):
        return None
    path = _file_in_package(model, what) if form == "package" else user_path(model)
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise UserError(f"{what}: there is no file {path}.")
    return path


def model_digest(path: Path, cache_dir: Path | None = None) -> str:
    """Identity of a model directory: a hub snapshot's commit, else a hash of its configs, weights and
    tokenizer. What large files came to is kept in `cache_dir`, where one is given."""
    path = Path(path)
    if path.parent.name == "snapshots":
        return path.name
    converted = path / _CONVERTED
    if converted.is_file():
        return canonical_hash(json.loads(converted.read_text()))
    files = [file for file in sorted(path.iterdir()) if file.suffix in _DIGEST_SUFFIXES]
    return canonical_hash({file.name: _file_digest(file, cache_dir) for file in files})


def _file_digest(file: Path, cache_dir: Path | None) -> str:
    """The sha256 of a file, read once as long as the file system says that it stayed what it was."""
    before = file.stat()
    if cache_dir is None or before.st_size < _KEPT_BYTES:
        return sha256_file(file)
    kept = cache_dir / _DIGESTS
    name, stamp = str(file.resolve()), [before.st_size, before.st_mtime_ns, before.st_ctime_ns, before.st_ino]
    if (known := _kept_digests(kept).get(name)) and known[:-1] == stamp:
        return str(known[-1])
    digest = sha256_file(file)
    # Changed again within a tick of the clock a file would have the same times.
    if time.time_ns() - max(stamp[1:3]) > _SETTLED_NS:
        cache_dir.mkdir(parents=True, exist_ok=True)
        write_json(kept, {**_kept_digests(kept), name: [*stamp, digest]})
    return digest


def _kept_digests(kept: Path) -> dict[str, list[Any]]:
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
        return {name: each for name, each in found.items() if isinstance(each, list) and len(each) == 5}
    except (OSError, ValueError, AttributeError):
        return {}


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


def _shipped(name: str, what: str) -> Path:
    there = sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))
    if name not in there:
        raise UserError(f"{what}: no drafter {name!r} is shipped; there are: {', '.join(there) or 'none'}.")
    return SHIPPED / name


def _random(seed: str, cache_dir: Path, what: str) -> Path:
    from distill.tiny import make_tiny_target

    if not seed.isdecimal():
        raise UserError(f"{what}: random:{seed} must read random:SEED with a whole number.")
    directory = cache_dir / f"random-{int(seed)}"
    if not directory.is_dir():
        replace_directory(directory, lambda folder: make_tiny_target(folder, int(seed)))
    return directory


def _converted_path(gguf: Path, cache_dir: Path) -> Path:
    return cache_dir / f"{gguf.stem}-{_file_digest(gguf, cache_dir)[:16]}"


def _converted(gguf: Path, cache_dir: Path, what: str) -> Path:
    """The directory that holds `gguf` as float32 safetensors; written once per content of the file."""
    directory = _converted_path(gguf, cache_dir)
    if not (directory / _CONVERTED).is_file():
        replace_directory(directory, lambda folder: _convert(gguf, folder, what))
    return directory


def _convert(gguf: Path, folder: Path, what: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from distill.models import without_bars

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
        snapshot = Path(snapshot_download(model, revision=revision, allow_patterns=_HUB_PATTERNS))
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
    if (missing := missing_weights(snapshot)) is not None:  # without the hub half a download counts as whole
        raise UserError(
            f"{what}: of {at} only a part was downloaded ({missing} is missing), and the hub cannot be "
            "reached for the rest, or has no such safetensors: connect, and start again."
        )
    return snapshot
