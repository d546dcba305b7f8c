"""The model hub, asked what can be read there; nothing is downloaded."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from distill.findings import Finding
from distill.resolve import missing_weights
from distill.sizes import size_text

HUB_SECONDS = 10.0
T = TypeVar("T")


class Hub:
    """Asks the hub what can be read, without downloading; after one failure to connect it is not asked
    again.
    """

    def __init__(self) -> None:
        self.unreachable = ""
        self.download_bytes = 0

    def look(self, what: str, repository: str, revision: str | None, kind: str) -> Finding:
        """Is `repository` at `revision` on this machine already, or may we read it from the hub?"""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        label = f"{repository} at {revision[:12]}" if revision else repository
        try:
            found = snapshot_download(repository, repo_type=kind, revision=revision, local_files_only=True)
            if kind != "model" or missing_weights(Path(found)) is None:
                return Finding("ok", what, f"{label}, downloaded before")
        except LocalEntryNotFoundError:
            pass
        page = repository if kind == "model" else f"datasets/{repository}"
        try:
            if self.unreachable:
                raise ConnectionError(self.unreachable)
            size = within(HUB_SECONDS, lambda: self._ask(repository, revision, kind))
        except GatedRepoError:
            text = (
                f"{label}: accept its licence on the hub (page {page}), then log in with `hf auth login` "
                "or set HF_TOKEN"
            )
            return Finding("blocks", what, text)
        except RevisionNotFoundError:
            return Finding("blocks", what, f"{repository} has no commit {revision} on the hub")
        except RepositoryNotFoundError:
            text = f"{label} is neither here nor on the hub: check the name, or log in with `hf auth login`"
            return Finding("blocks", what, text)
        except Exception as error:  # whatever the network stack raises: offline mode, DNS, proxies, time-outs
            name = type(error).__name__
            self.unreachable = self.unreachable or (
                "HF_HUB_OFFLINE is set" if name == "OfflineModeIsEnabled" else name
            )
            text = f"{label} is not on this machine, and the hub cannot be reached ({self.unreachable})"
            if kind == "model":
                text += "; a gated one needs its licence accepted there, and `hf auth login` or HF_TOKEN"
            return Finding("blocks", what, text)
        self.download_bytes += size
        return Finding("ok", what, f"{label} on the hub, {size_text(size)} to download")

    def _ask(self, repository: str, revision: str | None, kind: str) -> int:
        from huggingface_hub import HfApi

        api = HfApi()
        api.auth_check(repository, repo_type=kind)  # raises where the licence was not accepted
        info = api.repo_info(
            repository, revision=revision, repo_type=kind, files_metadata=True, timeout=HUB_SECONDS
        )
        wanted = (".safetensors", ".json", ".parquet", ".jsonl")
        files = getattr(info, "siblings", None) or []
        return sum(int(file.size or 0) for file in files if file.rfilename.endswith(wanted))


def within(seconds: float, ask: Callable[[], T]) -> T:
    """What `ask` returns or raises; `TimeoutError` after `seconds`, for not every client of the network gives
    up by itself.
    """
    told: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            told.put((ask(), None))
        except Exception as error:
            told.put((None, error))

    threading.Thread(target=work, daemon=True).start()  # nobody waits for it where it hangs for good
    try:
        answer, error = told.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} seconds") from None
    if error is not None:
        raise error
    return cast("T", answer)
