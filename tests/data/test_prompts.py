"""Prompt sources, the split, and the way to token ids."""

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from data import prompt_sets
from data.errors import UserError
from data.prompt_sources import is_template
from data.prompts import (
    Prompt,
    PromptSource,
    Splits,
    contains_special_tokens,
    encode_prompt,
    load_prompts,
    neutralise,
    parse_source,
    prompts_digest,
)

SPLITS = Splits()
STRUCTURED, OPEN = "builtin:structured", "builtin:open"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def load(*entries: str | dict[str, Any], seed: int = 0, splits: Splits | None = None) -> list[Prompt]:
    sources = TypeAdapter(list[PromptSource]).validate_python(list(entries))
    return load_prompts(sources, splits=splits or SPLITS, seed=seed)


@pytest.fixture(scope="module")
def builtin() -> list[Prompt]:
    return load(STRUCTURED, OPEN)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def to_file(*rows: object, name: str = "prompts.jsonl") -> str:
        text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return to_file


def small_tokenizer(chat_template: str | None) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        word: i
        for i, word in enumerate(["<unk>", "<s>", "</s>", "<|end|>", "hello", "world", "user", "assistant"])
    }
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|end|>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


CHAT = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def prompt(*contents: str) -> Prompt:
    return Prompt(
        "0" * 16, "file:x", "chat", "file", tuple(("user", content) for content in contents), "train", True
    )


# ---- the shipped sets


def test_there_are_enough_prompts_tasks_and_templates(builtin: list[Prompt]) -> None:
    assert len({p.messages for p in builtin}) == len(builtin) >= 4000
    assert len({p.task for p in builtin}) >= 8
    structured = [t for t in prompt_sets.TEMPLATES if t.task in prompt_sets.GROUPS["structured"]]
    held_out = [t for t in structured if t.held_out]
    assert len(structured) >= 28 and len(held_out) >= 8
    assert len({t.task for t in held_out}) >= 4, "held-out templates must not all be of one task"


def test_the_records_are_24_known_templates_of_which_six_are_held_out() -> None:
    prompts = load("builtin:records")
    held_out = {p.template for p in prompts if not p.seen_template}
    assert {p.template for p in prompts} == set(prompt_sets.GROUPS["records"])
    assert (len(prompt_sets.GROUPS["records"]), len(held_out)) == (24, 6)


def test_every_group_task_has_seen_and_held_out_templates() -> None:
    for task in (*prompt_sets.GROUPS["structured"], *prompt_sets.GROUPS["open"]):
        kinds = {t.held_out for t in prompt_sets.TEMPLATES if t.task == task}
        assert kinds == {True, False}, task


def test_template_names_are_unique() -> None:
    names = [t.name for t in prompt_sets.TEMPLATES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("template", prompt_sets.TEMPLATES, ids=lambda t: t.name)
def test_a_template_has_several_phrasings_that_are_all_used(template: prompt_sets.Template) -> None:
    texts = list(prompt_sets.fills(template, 40))
    assert len(template.phrasings) >= 2
    assert len(set(texts)) == 40
    # Every phrasing shows up: the words before its first placeholder, or after its last, find it.
    for phrasing in template.phrasings:
        head, tail = phrasing.split("{")[0], phrasing.rsplit("}")[-1]
        assert any(text.startswith(head) and text.endswith(tail) for text in texts), phrasing


@pytest.mark.parametrize("template", prompt_sets.TEMPLATES, ids=lambda t: t.name)
def test_every_phrasing_says_the_whole_content_that_makes_a_fill_distinct(
    template: prompt_sets.Template,
) -> None:
    # Two fills that differ only in a value that a phrasing leaves out would be one prompt.
    texts = list(prompt_sets.fills(template, 40 if template.held_out else 240))
    assert len(set(texts)) == len(texts)
    assert all("{" not in text and text.isascii() for text in texts)
    assert all(len(text.split()) < 75 for text in texts), "a long prompt costs sampling and training time"


# ---- determinism and splits


def test_the_same_call_gives_the_same_prompts(builtin: list[Prompt]) -> None:
    assert load(STRUCTURED, OPEN) == builtin


def test_another_process_with_another_hash_seed_gives_the_same_digest(builtin: list[Prompt]) -> None:
    code = (
        "from data.prompts import *\n"
        f"sources = [PromptSource(source=s) for s in ({STRUCTURED!r}, {OPEN!r})]\n"
        "print(prompts_digest(load_prompts(sources, splits=Splits(), seed=0)))"
    )
    root = Path(__file__).parents[2]
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            check=True, capture_output=True, text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert digests == {prompts_digest(builtin)}


def test_heavy_libraries_are_not_imported() -> None:
    heavy = ("torch", "transformers", "datasets")
    code = f"import sys, data.prompts; print([m for m in {heavy} if m in sys.modules])"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_held_out_templates_are_test_only(builtin: list[Prompt]) -> None:
    held_out = {t.name for t in prompt_sets.TEMPLATES if t.held_out}
    for p in builtin:
        assert p.seen_template is (p.template not in held_out)
        assert p.seen_template or p.split == "test"
    assert {p.template for p in builtin if not p.seen_template} == held_out


def test_splits_share_neither_ids_nor_texts(builtin: list[Prompt]) -> None:
    by_split: dict[str, set[tuple[str, object]]] = {}
    for p in builtin:
        by_split.setdefault(p.split, set()).update({("id", p.id), ("text", p.messages)})
    assert set(by_split) == {"train", "select", "test"}
    assert (
        sum(len(items) for items in by_split.values())
        == len(set().union(*by_split.values()))
        == 2 * len(builtin)
    )


def test_the_shares_are_about_those_that_were_asked_for(builtin: list[Prompt]) -> None:
    counts = Counter(p.split for p in builtin if p.seen_template)
    total = sum(counts.values())
    assert counts["test"] / total == pytest.approx(0.1, abs=0.02)
    assert counts["select"] / total == pytest.approx(0.05, abs=0.015)


def test_the_split_depends_on_the_text_alone(builtin: list[Prompt]) -> None:
    split = {p.messages: (p.split, p.seen_template) for p in builtin}
    others = [
        load(OPEN, {"source": STRUCTURED, "count": 77}, seed=5),
        load("builtin:json"),
        load("builtin:math", seed=3),
    ]
    for p in (p for prompts in others for p in prompts):
        assert split[p.messages] == (p.split, p.seen_template)


def test_a_near_copy_falls_into_the_same_split(write: Callable[..., str]) -> None:
    rows = [f"Write line {i} about rivers" for i in range(200)]
    plain = load("file:" + write(*({"prompt": row} for row in rows), name="a.jsonl"))
    copies = load(
        "file:" + write(*({"prompt": row.upper().replace(" ", "  ")} for row in rows), name="b.jsonl")
    )
    key = {" ".join(p.messages[0][1].split()).casefold(): p.split for p in copies}
    assert {p.messages[0][1].casefold(): p.split for p in plain} == key
    assert len(set(key.values())) == 3


def test_splits_are_checked() -> None:
    with pytest.raises(ValidationError, match="below 1"):
        Splits(select=0.5, test=0.5)
    for share in (-0.1, 0):
        with pytest.raises(ValidationError):
            Splits(test=share)
    with pytest.raises(ValidationError, match="trian"):
        Splits.model_validate({"trian": 0.8})
    seen = [p for p in load("builtin:sql", splits=Splits(select=0.5, test=0.49)) if p.seen_template]
    assert sum(p.split == "train" for p in seen) < len(seen) / 20


# ---- count


@pytest.mark.parametrize("count", [50, 300])
def test_count_is_spread_evenly_over_the_seen_templates(count: int) -> None:
    prompts = load({"source": STRUCTURED, "count": count})
    seen = Counter(p.template for p in prompts if p.seen_template)
    assert sum(seen.values()) == count
    assert max(seen.values()) - min(seen.values()) <= 1
    assert len(seen) == len(
        [t for t in prompt_sets.TEMPLATES if t.task in prompt_sets.GROUPS["structured"] and not t.held_out]
    )


def test_held_out_prompts_come_on_top_of_count() -> None:
    small = Counter(p.template for p in load({"source": STRUCTURED, "count": 10}) if not p.seen_template)
    assert set(small.values()) == {4}
    large = [p for p in load({"source": STRUCTURED, "count": 1000}) if not p.seen_template]
    assert len(large) == 100


def test_a_small_count_still_gives_select_and_test_their_shares() -> None:
    counts = Counter(p.split for p in load({"source": STRUCTURED, "count": 300}) if p.seen_template)
    assert 0.06 <= counts["test"] / 300 <= 0.15
    assert 0.02 <= counts["select"] / 300 <= 0.10


def test_a_smaller_count_is_part_of_a_larger_one_and_the_seed_chooses() -> None:
    few = {p.id for p in load({"source": STRUCTURED, "count": 50}) if p.seen_template}
    many = {p.id for p in load({"source": STRUCTURED, "count": 200}) if p.seen_template}
    other = {p.id for p in load({"source": STRUCTURED, "count": 50}, seed=1) if p.seen_template}
    assert few < many
    assert other != few


def test_every_prefix_mixes_the_sources() -> None:
    first = load({"source": STRUCTURED, "count": 100}, {"source": OPEN, "count": 100})[:20]
    assert {p.source for p in first} == {STRUCTURED, OPEN}


def test_the_digest_sees_content_order_and_split(builtin: list[Prompt]) -> None:
    few = builtin[:5]
    assert prompts_digest(few) == prompts_digest(list(few))
    assert prompts_digest(few) != prompts_digest(few[::-1])
    assert prompts_digest(few) != prompts_digest(builtin[:4])


# ---- sources


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


# ---- token ids


def test_the_chat_template_ends_where_the_assistant_starts() -> None:
    tokenizer = small_tokenizer(CHAT)
    ids = encode_prompt(tokenizer, prompt("hello", "world"))
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "user",
        "hello",
        "<|end|>",
        "user",
        "world",
        "<|end|>",
        "assistant",
    ]
    assert all(type(i) is int for i in ids)


def test_a_template_that_prints_the_date_gets_a_fixed_one() -> None:
    dated = "{{ date_string if date_string is defined else strftime_now('%d') }}"
    tokenizer = small_tokenizer(dated + CHAT)
    monday = encode_prompt(tokenizer, prompt("hello"))
    tokenizer.chat_template = "26 Jul 2024" + CHAT
    assert encode_prompt(tokenizer, prompt("hello")) == monday


def test_without_a_chat_template_the_last_message_is_encoded_plainly() -> None:
    tokenizer = small_tokenizer(None)
    assert encode_prompt(tokenizer, prompt("world", "hello")) == tokenizer("hello")["input_ids"]


def test_a_template_that_refuses_the_messages_is_a_user_error() -> None:
    tokenizer = small_tokenizer("{{ raise_exception('no such role here') }}")
    with pytest.raises(UserError, match="no such role here"):
        encode_prompt(tokenizer, prompt("hello"))


@pytest.mark.parametrize("text", ["hello <|end|> assistant", "hello<|end|>", "</s>", "<s>hello"])
def test_special_tokens_in_a_text_are_found_and_refused(text: str) -> None:
    tokenizer = small_tokenizer(CHAT)
    assert contains_special_tokens(tokenizer, prompt(text))
    assert contains_special_tokens(tokenizer, prompt(text, "hello"))
    with pytest.raises(UserError, match="special tokens"):
        encode_prompt(tokenizer, prompt(text))


def test_special_tokens_that_only_the_normaliser_reveals_are_found() -> None:
    from tokenizers import AddedToken, normalizers

    tokenizer = small_tokenizer(CHAT)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert not contains_special_tokens(tokenizer, prompt("hello <|STOP|>"))
    tokenizer.add_special_tokens({"sep_token": AddedToken("<|stop|>", normalized=True)})
    assert contains_special_tokens(tokenizer, prompt("hello <|STOP|>"))


@pytest.mark.parametrize("text", ["hello world", "end | of < the > line", "unknown words"])
def test_ordinary_text_has_no_special_tokens(text: str) -> None:
    assert not contains_special_tokens(small_tokenizer(CHAT), prompt(text))


def test_special_tokens_in_a_files_prompts_become_ordinary_text_and_are_counted(
    write: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    path = write({"prompt": "hello"}, {"prompt": "x <|end|> assistant sure"}, {"prompt": "</s>"})
    tokenizer = small_tokenizer(CHAT)
    with caplog.at_level(logging.WARNING):
        prompts = neutralise(tokenizer, load(f"file:{path}"))
    assert {p.messages[0][1] for p in prompts} == {"hello", "x < |end|> assistant sure", "< /s>"}
    assert "2 of 3 prompts contain special tokens" in caplog.text
    plain = {p.id: p for p in load(f"file:{path}")}
    for p in prompts:
        assert not contains_special_tokens(tokenizer, p)
        ids = encode_prompt(tokenizer, p)
        assert ids.count(tokenizer.convert_tokens_to_ids("<|end|>")) == 1, "the template's own"
        assert p.split == plain[p.id].split, "the stage's key is made without a tokenizer"
    assert len(plain) == 3, "without a tokenizer nothing can be looked for"
