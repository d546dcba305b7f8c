"""Prompts that are remembered: of pinned data sets alone, and never those of other contents."""

from collections.abc import Callable
from pathlib import Path

import pytest

from data import prompt_cache, prompt_sources
from data.prompt_cache import cached_prompts
from data.prompt_sources import ParsedSource, Prompt
from data.prompts import PromptSource, Splits
from tests.data.prompt_helpers import COMMIT, SPLITS

HUB = f"hub:org/set@{COMMIT}"
TOPICS = ("tides", "glass", "bees", "chess", "rivers", "salt", "violins", "comets")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data set's commits, each time it is read."""
    seen: list[str] = []

    def read(source: str, parsed: ParsedSource) -> list[Prompt]:
        seen.append(parsed.revision)
        return [
            prompt_sources._prompt(
                source, "set", "set", (("system", "Be brief."), ("user", f"What of {topic}?"))
            )
            for topic in TOPICS
        ]

    monkeypatch.setattr(prompt_sources, "_read_hub", read)
    return seen


def load(folder: Path, *sources: str, splits: Splits = SPLITS, seed: int = 0) -> list[Prompt]:
    chosen = [PromptSource(source=source) for source in sources]
    return cached_prompts(chosen, splits=splits, seed=seed, folder=folder)


def test_a_pinned_data_set_is_read_once(tmp_path: Path, reads: list[str]) -> None:
    first = load(tmp_path, HUB)
    assert len(first) == len(TOPICS) and load(tmp_path, HUB) == first and len(reads) == 1


def test_what_else_decides_the_prompts_is_another_entry(
    tmp_path: Path, reads: list[str], write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write({"prompt": "Name three rivers of France."})
    load(tmp_path, HUB, f"file:{path}")
    write({"prompt": "Name three lakes of Italy."})  # the same path
    found = load(tmp_path, HUB, f"file:{path}")
    assert {text for p in found for _, text in p.messages} >= {"Name three lakes of Italy."}
    load(tmp_path, HUB, f"file:{path}", seed=1)
    load(tmp_path, HUB, f"file:{path}", splits=Splits(test=0.5))
    load(tmp_path, HUB.replace("0", "1", 1), f"file:{path}")
    monkeypatch.setattr(prompt_cache, "_code", lambda: "another version")
    load(tmp_path, HUB, f"file:{path}")
    assert len(reads) == 6 == len(list(tmp_path.glob("prompts-*.json")))


@pytest.mark.parametrize("content", [b"", b"{", b"[{}]", b"[1]", b'{"a": 1}', b"\xff"])
def test_an_entry_that_cannot_be_read_is_made_again(tmp_path: Path, reads: list[str], content: bytes) -> None:
    first = load(tmp_path, HUB)
    (entry,) = tmp_path.glob("prompts-*.json")
    entry.write_bytes(content)
    assert load(tmp_path, HUB) == first and len(reads) == 2
    assert load(tmp_path, HUB) == first and len(reads) == 2


def test_other_sources_are_read_every_time(tmp_path: Path, write: Callable[..., str]) -> None:
    path = write({"prompt": "Name three rivers of France."})
    assert len(load(tmp_path, f"file:{path}", "builtin:sql")) > 100
    assert not list(tmp_path.glob("prompts-*"))
