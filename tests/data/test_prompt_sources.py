"""Where prompts come from: files, logs, Spec-Bench and the hub."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from data.errors import UserError
from data.prompt_sources import is_template
from data.prompts import (
    Prompt,
    PromptSource,
    Splits,
    parse_source,
)
from tests.data.prompt_helpers import COMMIT, OPEN, load


def test_sources_are_taken_apart() -> None:
    hub = parse_source(f"hub:org/set@{COMMIT}:test:question")
    assert (hub.kind, hub.place, hub.revision, hub.split, hub.column) == (
        "hub",
        "org/set",
        COMMIT,
        "test",
        "question",
    )
    assert parse_source(f"hub:set@{COMMIT}").split == "train"
    assert parse_source("file:a:b.jsonl").place == "a:b.jsonl"
    assert parse_source("builtin:json").place == "json"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "structured",
        "builtin:",
        "builtin:jsn",
        "file:",
        "hub:org/set",
        "hub:org/set@main",
        f"hub:a/b/c@{COMMIT}",
        "ftp:x",
    ],
)
def test_an_unknown_source_lists_the_known_forms(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_source(text)
    for form in (
        "builtin:",
        "structured",
        "sql",
        "file:PATH",
        "log:PATH",
        "specbench:PATH",
        "hub:DATASET@REVISION",
    ):
        assert form in str(error.value)
    with pytest.raises(ValidationError, match="file:PATH"):
        PromptSource.model_validate(text)


def test_an_entry_is_a_text_or_a_mapping() -> None:
    assert PromptSource.model_validate(OPEN) == PromptSource(source=OPEN, count=None)
    assert PromptSource.model_validate({"source": OPEN, "count": 3}).count == 3
    for wrong in ({"source": OPEN, "count": 0}, {"source": OPEN, "cuont": 3}, {"count": 3}, 7):
        with pytest.raises(ValidationError):
            PromptSource.model_validate(wrong)


def test_a_file_gives_prompts_and_messages(write: Callable[..., str]) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    path = write(
        {"prompt": "One", "task": "poem"},
        "",
        {"messages": talk, "template": "talks", "extra": 1},
        {"prompt": "One"},
    )
    prompts = {p.messages: p for p in load(f"file:{path}")}
    assert len(prompts) == 2, "the copy is dropped"
    one, two = prompts[(("user", "One"),)], prompts[(("system", "Be brief."), ("user", "Hello"))]
    assert (one.task, one.template, one.seen_template, one.source) == ("poem", "file", True, f"file:{path}")
    assert (two.task, two.template) == ("chat", "talks")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{broken", "not JSON"),
        ("[1]", "JSON object"),
        ({"text": "x"}, '"prompt"'),
        ({"prompt": "x", "messages": []}, "either"),
        ({"prompt": "  "}, "content"),
        ({"prompt": 3}, "a text or a list"),
        ({"messages": []}, "not empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            "last message",
        ),
        ({"prompt": "x", "task": 3}, "task"),
    ],
)
def test_a_bad_line_is_named(write: Callable[..., str], row: object, says: str) -> None:
    path = write({"prompt": "fine"}, row)
    with pytest.raises(UserError, match=says) as error:
        load(f"file:{path}")
    assert str(error.value).startswith(f"{path}:2: ")


def test_a_file_that_is_missing_binary_or_empty_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("\n\n")
    for name, says in (
        ("missing", "cannot be read"),
        ("bytes", "cannot be read"),
        ("empty", "gives no prompts"),
    ):
        with pytest.raises(UserError, match=says) as error:
            load(f"file:{tmp_path / name}")
        assert name in str(error.value)


def test_parquet_gives_what_jsonl_gives(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    rows = [
        {"prompt": "One", "messages": None, "task": "poem"},
        {"prompt": None, "messages": talk, "task": None},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    prompts = {p.messages: p.task for p in load(f"file:{tmp_path / 'p.parquet'}")}
    assert prompts == {(("user", "One"),): "poem", (("system", "Be brief."), ("user", "Hello")): "chat"}
    parquet.write_table(arrow.Table.from_pylist([{"text": "x"}]), tmp_path / "bad.parquet")
    with pytest.raises(UserError, match=r"bad\.parquet row 0: "):
        load(f"file:{tmp_path / 'bad.parquet'}")
    (tmp_path / "text.parquet").write_text("no such format")
    with pytest.raises(UserError, match=r"text\.parquet cannot be read"):
        load(f"file:{tmp_path / 'text.parquet'}")


def test_a_log_gives_conversations_up_to_the_last_question_and_counts_the_rest(
    write: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    talk = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]},
        {"role": "assistant", "content": "A model."},
        {"role": "user", "content": "Which one of them?"},
        {"role": "assistant", "content": "That one."},
    ]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    path = write(
        {"custom_id": "1", "method": "POST", "body": {"model": "m", "messages": talk}},
        {"messages": [{"role": "user", "content": "Name three rivers."}], "temperature": 0},
        {"body": {"prompt": "Count down from ten"}},
        {"body": {"messages": image}},
        {"messages": [{"role": "tool", "content": "42"}]},
        {"body": {"input": "x"}},
        {"body": None},
    )
    prompts = {p.messages for p in load(f"log:{path}")}
    assert prompts == {
        (
            ("system", "Be brief."),
            ("user", "Who are you?"),
            ("assistant", "A model."),
            ("user", "Which one of them?"),
        ),
        (("user", "Name three rivers."),),
        (("user", "Count down from ten"),),
    }
    assert "4 of 7 rows" in caplog.text


def test_all_turns_of_a_conversation_fall_into_one_split(write: Callable[..., str]) -> None:
    rows = []
    for i in range(60):
        turns: list[dict[str, str]] = [{"role": "user", "content": f"{i * 7919} is what in {i * i} words?"}]
        for turn in range(3):
            rows.append({"messages": list(turns)})
            turns += [
                {"role": "assistant", "content": f"answer {i * 31} {turn} " * 5},
                {"role": "user", "content": f"and {turn * 977 + i} what else is {i * 13}?"},
            ]
    prompts = load("log:" + write(*rows), splits=Splits(select=0.2, test=0.2))
    splits: dict[Any, set[str]] = {}
    for p in prompts:
        splits.setdefault(p.messages[0], set()).add(p.split)
    assert len(prompts) > 120 and all(len(each) == 1 for each in splits.values())
    assert {split for each in splits.values() for split in each} == {"train", "select", "test"}


def test_a_files_templates_are_held_out_whole_by_their_names(write: Callable[..., str]) -> None:
    def rows(count: int) -> list[dict[str, str]]:
        return [
            {"prompt": f"{i * 7919} of {t * 104729} {i}", "task": "mail", "template": f"mail {t}"}
            for t in range(count)
            for i in range(12)
        ]

    prompts = load("file:" + write(*rows(60)))
    unseen = {p.template for p in prompts if not p.seen_template}
    assert 2 <= len(unseen) <= 12
    assert {p.split for p in prompts if p.template in unseen} == {"test"}
    assert {p.split for p in prompts if p.template not in unseen} == {"train", "select", "test"}
    fewer = load("file:" + write(*rows(40), name="fewer.jsonl"))
    there = {p.template for p in fewer}
    assert {p.template for p in fewer if not p.seen_template} == unseen & there, "the others do not matter"
    few = load("file:" + write(*rows(4), name="few.jsonl"), splits=Splits(test=0.8))
    assert all(p.seen_template for p in few)
    plain = [{"prompt": row["prompt"]} for row in rows(60)]
    assert all(p.seen_template for p in load("file:" + write(*plain, name="plain.jsonl")))


def test_only_sets_and_files_that_name_templates_have_any(
    builtin: list[Prompt], write: Callable[..., str]
) -> None:
    assert all(is_template(p.task, p.template) for p in builtin)
    labelled = write({"prompt": "a", "task": "mail", "template": "reply"}, name="l.jsonl")
    assert [is_template(p.task, p.template) for p in load(f"file:{labelled}")] == [True]
    question = write({"category": "writing", "turns": ["Write"]}, name="q.jsonl")
    request = write({"messages": [{"role": "user", "content": "Name three rivers."}]}, name="r.jsonl")
    for source in ("file:" + write({"prompt": "b"}), f"specbench:{question}", f"log:{request}"):
        assert [is_template(p.task, p.template) for p in load(source)] == [False], source


def test_spec_bench_gives_first_turns_with_our_tasks(write: Callable[..., str]) -> None:
    path = write(
        {"question_id": 1, "category": "writing", "turns": ["Write a letter.", "Now rhyme it."]},
        {"question_id": 2, "category": "qa", "turns": ["Who was first?"]},
    )
    prompts = {p.messages[-1][1]: p for p in load(f"specbench:{path}")}
    assert set(prompts) == {"Write a letter.", "Who was first?"}
    assert {p.task for p in prompts.values()} == {"chat", "qa"}
    with pytest.raises(UserError, match=r"bad\.jsonl:1: .*turns"):
        load("specbench:" + write({"question": "x"}, name="bad.jsonl"))


def test_one_text_in_two_sources_is_kept_once_and_held_out_wins(write: Callable[..., str]) -> None:
    # The last one: the file's copy comes earlier in the mix, and would win by coming first.
    held_out = [p for p in load("builtin:json") if not p.seen_template][-1]
    path = write({"prompt": held_out.messages[0][1]}, {"prompt": "Something else"})
    for entries in ((f"file:{path}", "builtin:json"), ("builtin:json", f"file:{path}")):
        same = [p for p in load(*entries) if p.messages == held_out.messages]
        assert [(p.split, p.seen_template) for p in same] == [("test", False)]


class FakeRows:
    """What `load_dataset` gives back, as far as the loader looks."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns
        self.column_names = list(columns)
        self.cache_files = [{"filename": f"/cache/org___set/{COMMIT}/set-train.arrow"}]

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


def test_the_hub_is_asked_for_the_pinned_revision(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import datasets

    asked: list[tuple[Any, ...]] = []
    talk = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "Oh"},
    ]
    rows = FakeRows(messages=[talk, [{"role": "assistant", "content": "Hi"}]], question=["What?", None])

    def fake(name: str, revision: str, split: str) -> FakeRows:
        asked.append((name, revision, split))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert [p.messages for p in load(f"hub:org/set@{COMMIT}:part")] == [(("user", "Why?"),)]
    assert "1 of 2 rows" in caplog.text
    assert [p.messages for p in load(f"hub:org/set@{COMMIT}:part:question")] == [(("user", "What?"),)]
    assert asked == [("org/set", COMMIT, "part")] * 2
    with pytest.raises(UserError, match="messages, question"):
        load(f"hub:org/set@{COMMIT}:part:answer")
    with pytest.raises(UserError, match="what is cached here is another one"):
        load(f"hub:org/set@{COMMIT[::-1]}:part")


def test_an_unreachable_hub_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def fake(*args: object, **options: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", fake)
    with pytest.raises(UserError, match=r"org/set.*no route to host.*can be reached"):
        load(f"hub:org/set@{COMMIT}")
