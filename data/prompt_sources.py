"""Where prompts come from: the shipped sets, files, request logs, Spec-Bench and the hub, read into one
kind of record.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from data import prompt_sets
from data.errors import UserError
from data.files import canonical_hash, user_path
from data.json_lines import read_json_lines

_log = logging.getLogger(__name__)

# A template's prompts are thrown once, whatever the recipe; `count` then chooses among them.
_FILLS = 240
_HELD_OUT_FILLS = 40

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


@dataclass(frozen=True)
class ParsedSource:
    """A source string taken apart. `place` is a set's name, a path or a hub name; the rest is for the hub
    only."""

    kind: str  # builtin | file | log | specbench | hub
    place: str
    revision: str = ""
    split: str = "train"
    column: str = ""


def parse_source(text: str) -> ParsedSource:
    """Take a source string apart; `UserError` that lists the known forms when it is none of them."""
    kind, _, place = text.partition(":")
    if kind == "builtin" and place in _builtin_names():
        return ParsedSource(kind, place)
    if kind in ("file", "log", "specbench") and place:
        return ParsedSource(kind, place)
    # A branch or a tag may move, and the run's results with it: only a commit pins a data set.
    hub = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)@([0-9a-f]{40})(?::([\w.-]+)(?::([\w.-]+))?)?", place)
    if kind == "hub" and hub:
        return ParsedSource(kind, hub[1], hub[2], hub[3] or "train", hub[4] or "")
    raise UserError(
        f"prompt source {text!r} is not known: write builtin:NAME (NAME is {', '.join(_builtin_names())}), "
        "file:PATH (JSONL or Parquet), log:PATH (JSONL of OpenAI requests), specbench:PATH, or "
        "hub:DATASET@REVISION[:split[:column]] with a full commit hash as REVISION"
    )


@cache
def _builtin_names() -> tuple[str, ...]:
    return (*prompt_sets.GROUPS, *dict.fromkeys(template.task for template in prompt_sets.TEMPLATES))


def read_source(text: str) -> list[Prompt]:
    parsed = parse_source(text)
    readers: dict[str, Callable[[str, ParsedSource], list[Prompt]]] = {
        "builtin": _read_builtin,
        "file": _read_file,
        "log": _read_log,
        "specbench": _read_specbench,
        "hub": _read_hub,
    }
    return readers[parsed.kind](text, parsed)


def _read_builtin(source: str, parsed: ParsedSource) -> list[Prompt]:
    wanted = prompt_sets.GROUPS.get(parsed.place, (parsed.place,))
    return [
        _prompt(source, template.task, template.name, (("user", text),), held_out=template.held_out)
        for template in prompt_sets.TEMPLATES
        if template.task in wanted or template.name in wanted
        for text in _builtin_texts(template)
    ]


@cache
def _builtin_texts(template: prompt_sets.Template) -> tuple[str, ...]:
    return tuple(prompt_sets.fills(template, _HELD_OUT_FILLS if template.held_out else _FILLS))


def _read_parquet(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a Parquet file without their empty cells, each with the place to name in messages."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, arrow.ArrowException) as error:
        raise UserError(
            f"prompt file {path} cannot be read ({error}): give the path of a Parquet file"
        ) from error
    return [
        (f"{path} row {number}", {key: value for key, value in row.items() if value is not None})
        for number, row in enumerate(rows)
    ]


def _read_file(source: str, parsed: ParsedSource) -> list[Prompt]:
    prompts = []
    path = user_path(parsed.place)
    rows = _read_parquet(path) if path.suffix == ".parquet" else read_json_lines(path, "prompt file")
    for where, row in rows:
        if ("prompt" in row) == ("messages" in row):
            raise UserError(
                f'{where}: give either "prompt" (a text) or "messages" (a list of role and content)'
            )
        messages = _messages(row.get("prompt", row.get("messages")), where)
        if messages[-1][0] != "user":
            raise UserError(
                f"{where}: the last message must be the user's, as the answer to it is what is sampled"
            )
        labels = {key: row.get(key, default) for key, default in (("task", "chat"), ("template", "file"))}
        for key, label in labels.items():
            if not isinstance(label, str) or not label:
                raise UserError(f'{where}: "{key}" must be a text that is not empty')
        prompts.append(_prompt(source, labels["task"], labels["template"], messages))
    return prompts


def _read_log(source: str, parsed: ParsedSource) -> list[Prompt]:
    """Recorded requests: {"body": {...}} as in a batch file, or the body itself, with "messages" or "prompt".

    The whole conversation up to the last question is the prompt. A log holds all sorts of requests, so those
    that cannot be asked again (images, tool calls, no question) are left out and counted.
    """
    prompts, unusable = [], 0
    for where, row in read_json_lines(user_path(parsed.place), "prompt file"):
        body = row.get("body", row)
        try:
            asked = body.get("messages", body.get("prompt")) if isinstance(body, dict) else None
            messages = _up_to_last_question(_messages(_plain_turns(asked), where))
        except UserError:
            unusable += 1
            continue
        prompts.append(_prompt(source, "log", "log", messages))
    _warn_of_unusable(source, unusable, len(prompts))
    return prompts


def _plain_turns(value: Any) -> Any:
    """OpenAI's messages in our words: the developer is the system, and text parts are one text."""
    if not isinstance(value, list):
        return value
    turns = []
    for turn in value:
        if not isinstance(turn, dict):
            return value
        content = turn.get("content")
        if isinstance(content, list):
            content = "".join(_part_text(part) for part in content)
        role = "system" if turn.get("role") == "developer" else turn.get("role")
        turns.append({"role": role, "content": content})
    return turns


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise UserError("a part of a message that is no text")
    return text


def _up_to_last_question(messages: Messages) -> Messages:
    for end in range(len(messages), 0, -1):
        if messages[end - 1][0] == "user":
            return messages[:end]
    raise UserError("a conversation without a user's turn")


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
        if not _is_text(content):
            raise UserError(f"{where}: a message holds half of a character (a lone surrogate): take it out")
        messages.append((role, content))
    return tuple(messages)


def _is_text(content: str) -> bool:
    """JSON can spell halves of characters, which no tokenizer reads."""
    try:
        content.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_specbench(source: str, parsed: ParsedSource) -> list[Prompt]:
    prompts = []
    for where, row in read_json_lines(user_path(parsed.place), "prompt file"):
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
            f"data set {parsed.place} at {parsed.revision} could not be loaded "
            f"({type(error).__name__}: {reason}): check the name, the split, the access rights and that "
            "the hub can be reached, or use file:PATH"
        ) from error
    # Without the hub, or without the commit there, the client takes whatever commit it has in its cache.
    if not all(parsed.revision in file["filename"] for file in rows.cache_files):
        raise UserError(
            f"data set {parsed.place} at {parsed.revision} could not be loaded: the hub cannot be reached or "
            "has no such commit, and what is cached here is another one"
        )
    column = parsed.column or next((c for c in ("messages", "prompt") if c in rows.column_names), "")
    if column not in rows.column_names:
        raise UserError(
            f"data set {parsed.place} has no column {column or 'messages or prompt'}: name one of "
            f"{', '.join(rows.column_names)} as hub:{parsed.place}@{parsed.revision}:{parsed.split}:COLUMN"
        )
    name = parsed.place.rpartition("/")[2]  # measures by task tell the data sets apart
    prompts, unusable = [], 0
    for number, value in enumerate(rows[column]):
        try:
            # What follows in a data set is some other model's answer.
            messages = first_question(_messages(value, f"{parsed.place} row {number}"))
        except UserError:
            unusable += 1
            continue
        prompts.append(_prompt(source, name, name, messages))
    _warn_of_unusable(source, unusable, len(prompts))
    return prompts


def _warn_of_unusable(source: str, unusable: int, usable: int) -> None:
    if unusable:
        _log.warning("%s: %d of %d rows hold no prompt and are left out", source, unusable, unusable + usable)


def first_question(messages: Messages) -> Messages:
    """A conversation up to its first user turn."""
    for end, (role, _) in enumerate(messages, 1):
        if role == "user":
            return messages[:end]
    raise UserError("a conversation without a user's turn")


def is_template(task: str, template: str) -> bool:
    """Does a prompt's `template` name a wording that others share? Files without templates, logs, Spec-Bench
    and data sets of the hub have none: there it says where the prompt comes from.
    """
    return template not in (task, "file", "log") and not template.startswith("specbench_")


def _prompt(source: str, task: str, template: str, messages: Messages, *, held_out: bool = False) -> Prompt:
    key = canonical_hash([source, template, messages])
    return Prompt(key, source, task, template, messages, "test" if held_out else "", not held_out)
