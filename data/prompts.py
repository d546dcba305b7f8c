"""Prompts from built-in sets, files and the hub, split into train, select and test, and turned into token ids.

A prompt's split depends on nothing but its text: not on the seed, the count, the source or the order of sources.
So a drafter trained under one recipe was never shown the test prompts of another, which is what makes "before"
and "after" comparable. A built-in template that is held out whole gives test prompts only (`seen_template` False).
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from data import prompt_sets
from data.errors import UserError
from data.files import canonical_hash

_log = logging.getLogger(__name__)
T = TypeVar("T")

# A template's prompts are thrown once, whatever the recipe; `count` then chooses among them.
_FILLS = 240
_HELD_OUT_FILLS = 40
# Held-out prompts that come along with a source even if its `count` is tiny.
_HELD_OUT_AT_LEAST = 4

# Spec-Bench's categories in our words; a category that is not listed keeps its own name.
_SPECBENCH_TASKS = {
    "writing": "chat",
    "roleplay": "chat",
    "reasoning": "chat",
    "stem": "chat",
    "humanities": "chat",
    "coding": "code",
    "math_reasoning": "math",
    "summarization": "summarise",
    "translation": "translate",
    "extraction": "extract",
}
_ROLES = ("system", "user", "assistant")
Messages = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Prompt:
    """One conversation that ends with a user's turn, and the split it belongs to."""

    id: str  # stable hash of (source, template, messages)
    source: str  # the recipe's source string, such as "builtin:structured"
    task: str
    template: str
    messages: Messages  # (role, content)
    split: str  # train | select | test
    seen_template: bool  # False only for prompts of a template that is held out whole


class Splits(BaseModel):
    """The shares of a template's prompts that go to select (best checkpoint, K) and to test; the rest trains."""

    model_config = ConfigDict(extra="forbid")

    select: float = Field(0.05, ge=0, lt=1)
    test: float = Field(0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _leaves_something_to_train_on(self) -> "Splits":
        if self.select + self.test >= 1:
            raise UserError(
                f"splits.select + splits.test is {self.select + self.test:g}: it must be below 1, as the rest trains"
            )
        return self


@dataclass(frozen=True)
class ParsedSource:
    """A source string taken apart. `place` is a set's name, a path or a hub name; the rest is for the hub only."""

    kind: str  # builtin | file | specbench | hub
    place: str
    revision: str = ""
    split: str = "train"
    column: str = ""


def parse_source(text: str) -> ParsedSource:
    """Take a source string apart; `UserError` that lists the known forms when it is none of them."""
    kind, _, place = text.partition(":")
    if kind == "builtin" and place in _builtin_names():
        return ParsedSource(kind, place)
    if kind in ("file", "specbench") and place:
        return ParsedSource(kind, place)
    # A branch or a tag may move, and the run's results with it: only a commit pins a data set.
    hub = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)@([0-9a-f]{40})(?::([\w.-]+)(?::([\w.-]+))?)?", place)
    if kind == "hub" and hub:
        return ParsedSource(kind, hub[1], hub[2], hub[3] or "train", hub[4] or "")
    raise UserError(
        f"prompt source {text!r} is not known: write builtin:NAME (NAME is {', '.join(_builtin_names())}), file:PATH "
        "(JSONL), specbench:PATH, or hub:DATASET@REVISION[:split[:column]] with a full commit hash as REVISION"
    )


def _builtin_names() -> list[str]:
    return [*prompt_sets.GROUPS, *dict.fromkeys(template.task for template in prompt_sets.TEMPLATES)]


class PromptSource(BaseModel):
    """One entry of a recipe's prompts: where they come from and how many at most (None: all).

    `count` counts the train, select and test prompts of the seen templates. A built-in set's held-out templates
    give test prompts on top of it: the test share of `count`, or four per held-out template if that is more.
    """

    model_config = ConfigDict(extra="forbid")

    source: str
    count: int | None = Field(None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    @field_validator("source")
    @classmethod
    def _is_known(cls, value: str) -> str:
        parse_source(value)
        return value


def load_prompts(
    sources: Iterable[PromptSource | str], *, splits: Splits, seed: int, tokenizer: Any = None
) -> list[Prompt]:
    """All prompts of `sources`, each once, interleaved so that every prefix covers sources, templates and splits.

    `seed` chooses which prompts of a template are taken when `count` limits them, and their order; it never
    moves a prompt into another split. With a `tokenizer`, prompts from outside that contain one of its special
    tokens are dropped, with a warning that counts them. The same conversation in two sources is kept once, and
    as a held-out one if either source holds it out.

    Raises:
        UserError: a source cannot be read or gives no prompts.
    """
    loaded = []
    for entry in sources:
        source = PromptSource.model_validate(entry) if isinstance(entry, str) else entry
        prompts = _split(_read_source(source.source), splits)
        if tokenizer is not None and parse_source(source.source).kind != "builtin":
            prompts = _without_special_tokens(tokenizer, prompts, source.source)
        if not prompts:
            raise UserError(f"prompt source {source.source} gives no prompts: check what it points to")
        loaded.append(_choose(_without_duplicates(prompts), source.count, splits, seed))
    return _without_duplicates(_interleave(loaded))


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """16 hex digits that change with any prompt, its split or the order of the prompts."""
    return canonical_hash([[p.id, p.task, p.split, p.seen_template] for p in prompts])


def _unit(*parts: object) -> float:
    """A number in [0, 1) that depends on `parts` alone: the same in every process and on every machine."""
    text = json.dumps(parts, ensure_ascii=True)
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:6], "big") / 2**48


def _prompt(source: str, task: str, template: str, messages: Messages, *, held_out: bool = False) -> Prompt:
    key = canonical_hash([source, template, messages])
    return Prompt(key, source, task, template, messages, "test" if held_out else "", not held_out)


def _split(prompts: list[Prompt], splits: Splits) -> list[Prompt]:
    return [p if p.split else replace(p, split=_split_of(p.messages, splits)) for p in prompts]


def _split_of(messages: Messages, splits: Splits) -> str:
    # By the text and not the id, which holds the source: one text under two sources must not land in two splits.
    # Blanks and capitals do not count, so neither does a near copy of a training prompt reach the tests.
    place = _unit("split", [[role, " ".join(content.split()).casefold()] for role, content in messages])
    if place < splits.test:
        return "test"
    return "select" if place < splits.test + splits.select else "train"


def _without_duplicates(prompts: list[Prompt]) -> list[Prompt]:
    held_out = {p.messages for p in prompts if not p.seen_template}
    seen: set[Messages] = set()
    kept = []
    for prompt in prompts:
        if prompt.messages not in seen and not (prompt.seen_template and prompt.messages in held_out):
            seen.add(prompt.messages)
            kept.append(prompt)
    return kept


def _choose(prompts: list[Prompt], count: int | None, splits: Splits, seed: int) -> list[Prompt]:
    """The first `count` prompts of the seen templates and, for the tests, a share of the held-out ones."""
    seen = _balanced([p for p in prompts if p.seen_template], seed)
    held_out = _balanced([p for p in prompts if not p.seen_template], seed)
    if count is not None:
        templates = len({p.template for p in held_out})
        held_out = held_out[: max(math.ceil(count * splits.test), _HELD_OUT_AT_LEAST * templates)]
        seen = seen[:count]
    return _interleave([seen, held_out])


def _balanced(prompts: list[Prompt], seed: int) -> list[Prompt]:
    """Every prefix holds the templates, and the splits, in about their overall proportions."""
    groups: dict[str, dict[str, list[Prompt]]] = {}
    for prompt in sorted(prompts, key=lambda p: _unit("order", seed, p.id)):
        groups.setdefault(prompt.template, {}).setdefault(prompt.split, []).append(prompt)
    # Each template starts elsewhere in its cycle of splits: else a short prefix would miss the rare splits of all.
    templates = [
        _interleave([group[split] for split in sorted(group)], phase=(number * 0.618034 + 0.5) % 1)
        for number, (_, group) in enumerate(sorted(groups.items()))
    ]
    return _interleave(templates)


def _interleave(lists: Sequence[Sequence[T]], phase: float = 0.5) -> list[T]:
    """Merge lists so that each is spread evenly over the whole; equally long ones take turns."""
    places = [((i + phase) / len(items), which, item) for which, items in enumerate(lists) for i, item in enumerate(items)]
    return [item for _, _, item in sorted(places, key=lambda place: place[:2])]


def _read_source(text: str) -> list[Prompt]:
    parsed = parse_source(text)
    readers: dict[str, Callable[[str, ParsedSource], list[Prompt]]] = {
        "builtin": _read_builtin,
        "file": _read_file,
        "specbench": _read_specbench,
        "hub": _read_hub,
    }
    return readers[parsed.kind](text, parsed)


def _read_builtin(source: str, parsed: ParsedSource) -> list[Prompt]:
    tasks = prompt_sets.GROUPS.get(parsed.place, (parsed.place,))
    return [
        _prompt(source, template.task, template.name, (("user", text),), held_out=template.held_out)
        for template in prompt_sets.TEMPLATES
        if template.task in tasks
        for text in _builtin_texts(template)
    ]


@cache
def _builtin_texts(template: prompt_sets.Template) -> tuple[str, ...]:
    return tuple(prompt_sets.fills(template, _HELD_OUT_FILLS if template.held_out else _FILLS))


def _read_jsonl(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with the `path:line` to name in messages."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt file {path} cannot be read ({error}): give the path of a UTF-8 JSONL file") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON ({error.msg}): every line must be one JSON object") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: a line must be a JSON object, not {type(row).__name__}")
        rows.append((where, row))
    return rows


def _read_file(source: str, parsed: ParsedSource) -> list[Prompt]:
    prompts = []
    for where, row in _read_jsonl(Path(parsed.place).expanduser()):
        if ("prompt" in row) == ("messages" in row):
            raise UserError(f'{where}: give either "prompt" (a text) or "messages" (a list of role and content)')
        messages = _messages(row.get("prompt", row.get("messages")), where)
        if messages[-1][0] != "user":
            raise UserError(f"{where}: the last message must be the user's, as the answer to it is what is sampled")
        labels = {key: row.get(key, default) for key, default in (("task", "chat"), ("template", "file"))}
        for key, label in labels.items():
            if not isinstance(label, str) or not label:
                raise UserError(f'{where}: "{key}" must be a text that is not empty')
        prompts.append(_prompt(source, labels["task"], labels["template"], messages))
    return prompts


def _messages(value: Any, where: str) -> Messages:
    """A text as one user turn, or a list of {role, content} as it is, checked."""
    turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: a prompt must be a text or a list of messages that is not empty")
    messages = []
    for turn in turns:
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if role not in _ROLES or not isinstance(content, str) or not content.strip():
            raise UserError(f'{where}: a message needs a "role" of {", ".join(_ROLES)} and a "content" text')
        messages.append((role, content))
    return tuple(messages)


def _read_specbench(source: str, parsed: ParsedSource) -> list[Prompt]:
    prompts = []
    for where, row in _read_jsonl(Path(parsed.place).expanduser()):
        turns, category = row.get("turns"), row.get("category")
        if not isinstance(turns, list) or not turns or not isinstance(category, str):
            raise UserError(f'{where}: a Spec-Bench question needs "category" and a list "turns"')
        task = _SPECBENCH_TASKS.get(category, category)
        prompts.append(_prompt(source, task, f"specbench_{category}", _messages(turns[0], where)))
    return prompts


def _read_hub(source: str, parsed: ParsedSource) -> list[Prompt]:
    from datasets import load_dataset

    try:
        rows = load_dataset(parsed.place, revision=parsed.revision, split=parsed.split)
    except Exception as error:  # the hub's client raises its own, the network's and the cache's kinds
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"data set {parsed.place} at {parsed.revision} could not be loaded ({type(error).__name__}: {reason}): "
            "check the name, the split, the access rights and that the hub can be reached, or use file:PATH"
        ) from error
    column = parsed.column or next((c for c in ("messages", "prompt") if c in rows.column_names), "")
    if column not in rows.column_names:
        raise UserError(
            f"data set {parsed.place} has no column {column or 'messages or prompt'}: name one of "
            f"{', '.join(rows.column_names)} as hub:{parsed.place}@{parsed.revision}:{parsed.split}:COLUMN"
        )
    prompts, unusable = [], 0
    for number, value in enumerate(rows[column]):
        try:
            messages = _first_question(_messages(value, f"{parsed.place} row {number}"))
        except UserError:
            unusable += 1
            continue
        prompts.append(_prompt(source, "chat", "hub", messages))
    if unusable:
        _log.warning("%s: %d of %d rows hold no prompt and are left out", source, unusable, unusable + len(prompts))
    return prompts


def _first_question(messages: Messages) -> Messages:
    """A recorded conversation up to its first user turn: what follows is some other model's answer."""
    for end, (role, _) in enumerate(messages, 1):
        if role == "user":
            return messages[:end]
    raise UserError("a conversation without a user's turn")


def contains_special_tokens(tokenizer: Any, prompt: Prompt) -> bool:
    """Whether a message's text would be read as one of the tokenizer's special tokens.

    Such a text could close its own turn and open another speaker's. Looked for as text and, since a tokenizer may
    normalise what it reads, as ids.
    """
    added = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
    texts = {*tokenizer.all_special_tokens, *(token.content for token in added)}
    ids = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    return any(
        any(text in content for text in texts)
        or not ids.isdisjoint(tokenizer(content, add_special_tokens=False)["input_ids"])
        for _, content in prompt.messages
    )


def _without_special_tokens(tokenizer: Any, prompts: list[Prompt], source: str) -> list[Prompt]:
    kept = [prompt for prompt in prompts if not contains_special_tokens(tokenizer, prompt)]
    if len(kept) < len(prompts):
        dropped = len(prompts) - len(kept)
        _log.warning("%s: %d of %d prompts contain special tokens and are left out", source, dropped, len(prompts))
    return kept


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The ids the target continues: the tokenizer's chat template up to where the assistant starts to speak.

    Without a chat template (a base model): the plain encoding of the last message's content, special tokens such
    as the beginning of the text added as the tokenizer does.

    Raises:
        UserError: the text contains special tokens, or the chat template refuses the messages.
    """
    if contains_special_tokens(tokenizer, prompt):
        raise UserError(f"prompt {prompt.id} of {prompt.source} contains special tokens of the tokenizer: remove it")
    if not tokenizer.chat_template:
        return list(tokenizer(prompt.messages[-1][1])["input_ids"])
    from jinja2 import TemplateError

    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    try:
        # Llama's templates print today's date unless they are given one: a prompt must not change overnight.
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, date_string="26 Jul 2024"
        )
    except TemplateError as error:
        raise UserError(f"the chat template refuses prompt {prompt.id} of {prompt.source}: {error}") from error
    return list(ids)
