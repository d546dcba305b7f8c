"""What a run depends on outside its recipe: how a model is named, the machine, the installed versions."""

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Literal

from data.files import user_path

ModelForm = Literal["package", "random", "shipped", "candidate", "local", "hub"]
_PREFIXES: dict[str, ModelForm] = {
    "package:": "package",
    "random:": "random",
    "shipped:": "shipped",
    "models:/": "candidate",
}
_PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "mlflow", "safetensors", "tokenizers")


def model_form(model: str) -> ModelForm:
    """How a recipe names a model.

    "package:PACKAGE/FILE.gguf" is a file inside an installed Python package, "random:SEED" a tiny model made
    on the spot, "shipped:NAME" a drafter in recipes/drafters/, "models:/NAME@ALIAS" a candidate registered in
    MLflow, "owner/name" a hub id; the rest, and whatever is there, is local.
    """
    for prefix, form in _PREFIXES.items():
        if model.startswith(prefix):
            return form
    if user_path(model).exists() or model.endswith(".gguf") or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", model):
        return "local"
    return "hub"


def machine() -> dict[str, str | int]:
    """The machine that measures: a speed holds for this one only."""
    return {
        "cpu": _processor(),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": (gpu() or ("", 0))[0],
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
    }


@functools.cache
def gpu() -> tuple[str, int] | None:
    """Name and bytes of the largest GPU, or None without one that torch can use. Asked of the driver and of
    the package: torch takes seconds to import.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or importlib.metadata.version("torch").endswith("+cpu"):
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        found = [line.split(",", 1) for line in asked.stdout.splitlines()]
        return max(((name.strip(), int(size) << 20) for size, name in found), key=lambda device: device[1])
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def environment() -> dict[str, str | int]:
    """The machine, the versions of the libraries and of this code: kept beside results, never part of a
    key.
    """
    found: dict[str, str | int] = {**machine(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["commit"] = code_commit()
    found["uncommitted_changes"] = str(found["commit"]).endswith("-dirty")
    return found


def code_commit() -> str:
    """The git commit of this code, "-dirty" where files differ from it, "unknown" outside a repository."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
