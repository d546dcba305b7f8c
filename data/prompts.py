"""Prompts from all sources, split into train, select and test, and turned into token ids.

A prompt's split depends on nothing but its text up to the first question: not on the seed, the count, the
source or the order of sources, nor on how far the conversation has got. So a drafter trained under one recipe
was never shown the test prompts of another, which is what makes "before" and "after" comparable. A template
that is held out whole, by a built-in set or by its name in a file, gives test prompts only (`seen_template`
False).

Prompts from outside are also kept apart by what they say: of near copies (`data.near_copies`) one is kept, a
held-out one where there is one. The shipped sets stay as they are: new fills of known templates are what
their test on seen templates asks for.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from data.errors import UserError
from data.files import canonical_hash
from data.near_copies import near_pairs
from data.prompt_sources import (
    Messages,
    Prompt,
    first_question,
    is_template,
    parse_source,
    read_source,
)

__all__ = [
    "Prompt",
    "PromptSource",
    "Splits",
    "contains_special_tokens",
    "encode_prompt",
    "load_prompts",
    "neutralise",
    "parse_source",
    "prompts_digest",
    "special_ids",
]

_log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_CHARACTERS = 1_000_000
"""Of a prompt from outside. A longer one is a file that landed in a line, and would cost minutes to read."""

# Held-out prompts that come along with a source even if its `count` is tiny.
_HELD_OUT_AT_LEAST = 4

# Of fewer templates in a source none is held out whole: each of them is too much of the data.
_TEMPLATES_AT_LEAST = 5


class Splits(BaseModel):
    """The shares of a template's prompts for select (best checkpoint, K) and for test; the rest trains."""

    model_config = ConfigDict(extra="forbid")

    select: float = Field(default=0.05, gt=0, lt=1)
    test: float = Field(default=0.1, gt=0, lt=1)

    @model_validator(mode="after")
    def _leaves_something_to_train_on(self) -> "Splits":
        if self.select + self.test >= 1:
            held_back = self.select + self.test
            raise UserError(
                f"splits.select + splits.test is {held_back:g}: it must be below 1 to train at all"
            )
        return self


class PromptSource(BaseModel):
    """One entry of a recipe's prompts: where they come from and how many at most (None: all).

    `count` counts the train, select and test prompts of the seen templates. A built-in set's held-out
    templates give test prompts on top of it: the test share of `count`, or four per held-out template if
    that is more.
    """

    model_config = ConfigDict(extra="forbid")

    source: str
    count: int | None = Field(default=None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    @field_validator("source")
    @classmethod
    def _is_known(cls, value: str) -> str:
        parse_source(value)
        return value


def load_prompts(sources: Iterable[PromptSource], *, splits: Splits, seed: int) -> list[Prompt]:
    """All prompts of `sources`, each once, so interleaved that a prefix covers sources, templates, splits.

    `seed` chooses which prompts of a template are taken when `count` limits them, and their order; it never
    moves a prompt into another split. The same conversation in two sources is kept once, and as a held-out
    one if either source holds it out.

    Raises:
        UserError: a source cannot be read or gives no prompts.
    """
    loaded = []
    for source in sources:
        read = _without_giants(read_source(source.source), source.source)
        prompts = _without_near_copies(_split(read, splits), source.source)
        if not prompts:
            raise UserError(f"prompt source {source.source} gives no prompts: check what it points to")
        loaded.append(_choose(_without_duplicates(prompts), source.count, splits, seed))
    return _without_near_copies(_without_duplicates(_interleave(loaded)), "all sources together")


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """16 hex digits that change with any prompt, its split or the order of the prompts."""
    return canonical_hash([[p.id, p.task, p.split, p.seen_template] for p in prompts])


def _unit(*parts: object) -> float:
    """A number in [0, 1) that depends on `parts` alone: the same in every process and on every machine."""
    text = json.dumps(parts, ensure_ascii=True)
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:6], "big") / 2**48


def _split(prompts: list[Prompt], splits: Splits) -> list[Prompt]:
    """Each prompt in its split. Shipped sets say which templates they hold out whole; of a file's templates
    about the test share is held out too, by their names alone.
    """
    named = {p.template for p in prompts if _of_file(p) and is_template(p.task, p.template)}
    enough = len(named) >= _TEMPLATES_AT_LEAST
    unseen = {name for name in named if enough and _unit("template", name) < splits.test}
    split = []
    for prompt in prompts:
        if _of_file(prompt) and prompt.template in unseen:
            prompt = replace(prompt, split="test", seen_template=False)
        split.append(prompt if prompt.split else replace(prompt, split=_split_of(prompt.messages, splits)))
    return split


def _of_file(prompt: Prompt) -> bool:
    return prompt.source.startswith("file:")


def _split_of(messages: Messages, splits: Splits) -> str:
    # All turns of a conversation share its first question: none is trained on where another is a test.
    # By the text and not the id, which holds the source: one text under two sources must not land in two
    # splits. Blanks and capitals do not count, so neither does a near copy of a training prompt reach the
    # tests.
    said = [[role, " ".join(content.split()).casefold()] for role, content in first_question(messages)]
    place = _unit("split", said)
    if place < splits.test:
        return "test"
    return "select" if place < splits.test + splits.select else "train"


def _without_giants(prompts: list[Prompt], source: str) -> list[Prompt]:
    kept = [p for p in prompts if sum(len(content) for _, content in p.messages) <= MAX_CHARACTERS]
    if len(kept) < len(prompts):
        gone = f"{len(prompts) - len(kept)} of {len(prompts)} prompts"
        if not kept:
            raise UserError(f"{source}: {gone} are longer than {MAX_CHARACTERS:,} characters: shorten them")
        _log.warning("%s: %s are longer than %d characters and are left out", source, gone, MAX_CHARACTERS)
    return kept


def _without_duplicates(prompts: list[Prompt]) -> list[Prompt]:
    held_out = {p.messages for p in prompts if not p.seen_template}
    seen: set[Messages] = set()
    kept = []
    for prompt in prompts:
        if prompt.messages not in seen and not (prompt.seen_template and prompt.messages in held_out):
            seen.add(prompt.messages)
            kept.append(prompt)
    return kept


def _without_near_copies(prompts: list[Prompt], where: str) -> list[Prompt]:
    """One prompt of each group of near copies: a shipped one, else a held-out one; the order stays.

    What the system says, which all of a log may share, is not compared.
    """
    outside = [parse_source(p.source).kind != "builtin" for p in prompts]
    if not any(outside):
        return prompts
    rank = {"test": 1, "select": 2, "train": 3}
    ranks = [rank[p.split] if new else 0 for p, new in zip(prompts, outside, strict=True)]
    order = sorted(range(len(prompts)), key=ranks.__getitem__)
    texts = ["\n".join(text for role, text in prompts[i].messages if role != "system") for i in order]
    dropped: set[int] = set()
    for earlier, later in near_pairs(texts, [outside[i] for i in order]):
        if earlier not in dropped:
            dropped.add(later)
    if dropped:
        _log.warning(
            "%s: %d of %d prompts are near copies of others and are left out", where, len(dropped), len(texts)
        )
    gone = {order[place] for place in dropped}
    return [prompt for i, prompt in enumerate(prompts) if i not in gone]


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
    # Each template starts elsewhere in its cycle of splits: else a short prefix would miss the rare splits
    # of all.
    templates = [
        _interleave([group[split] for split in sorted(group)], phase=(number * 0.618034 + 0.5) % 1)
        for number, (_, group) in enumerate(sorted(groups.items()))
    ]
    return _interleave(templates)


def _interleave(lists: Sequence[Sequence[T]], phase: float = 0.5) -> list[T]:
    """Merge lists so that each is spread evenly over the whole; equally long ones take turns."""
    places = [
        ((i + phase) / len(items), which, item)
        for which, items in enumerate(lists)
        for i, item in enumerate(items)
    ]
    return [item for _, _, item in sorted(places, key=lambda place: place[:2])]


def special_ids(tokenizer: Any) -> set[int]:
    """The ids of its special tokens, but for the one of unknown text; some tokenizers list hundreds."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return (added | set(tokenizer.all_special_ids)) - {tokenizer.unk_token_id}


def contains_special_tokens(tokenizer: Any, prompt: Prompt, special: set[int] | None = None) -> bool:
    """Whether the tokenizer would read a part of a message's text as one of its special tokens.

    Such a text could close its own turn and open another speaker's. Asked of the tokenizer and not looked for
    in the text, since a tokenizer may change what it reads before it looks for special tokens. `special`: its
    `special_ids`, asked for once by who asks of many prompts.
    """
    special = special_ids(tokenizer) if special is None else special
    return any(
        not special.isdisjoint(tokenizer(content, add_special_tokens=False)["input_ids"])
        for _, content in prompt.messages
    )


def neutralise(tokenizer: Any, prompts: Iterable[Prompt]) -> list[Prompt]:
    """Prompts in which special tokens are ordinary text: a blank behind the first character of each, counted
    in a warning. The shipped sets have none.

    Leaving such prompts out would leave out a workload's talk about templates and markup. Text that is read
    as special all the same (some tokenizers change it before they look) is for `encode_prompt` to refuse.
    """
    names = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))), re.IGNORECASE)
    special, made, changed = special_ids(tokenizer), [], 0
    for prompt in prompts:
        shipped = parse_source(prompt.source).kind == "builtin"
        if not shipped and contains_special_tokens(tokenizer, prompt, special):
            said = [(role, pattern.sub(_broken, content)) for role, content in prompt.messages]
            prompt = replace(prompt, messages=tuple(said))
            changed += 1
        made.append(prompt)
    if changed:
        _log.warning("%d of %d prompts contain special tokens, now made ordinary text", changed, len(made))
    return made


def _broken(found: re.Match[str]) -> str:
    return f"{found[0][0]} {found[0][1:]}"


def encode_prompt(tokenizer: Any, prompt: Prompt, special: set[int] | None = None) -> list[int]:
    """The ids the target continues: the tokenizer's chat template up to where the assistant starts to speak.

    Without a chat template (a base model): the plain encoding of the last message's content, special tokens
    such as the beginning of the text added as the tokenizer does. `special`: see `contains_special_tokens`.

    Raises:
        UserError: the text contains special tokens, or the chat template refuses the messages.
    """
    if contains_special_tokens(tokenizer, prompt, special):
        raise UserError(
            f"prompt {prompt.id} of {prompt.source} contains special tokens of the tokenizer: remove it"
        )
    if not tokenizer.chat_template:
        return list(tokenizer(prompt.messages[-1][1])["input_ids"])
    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    try:
        # Llama's templates print today's date unless they are given one: a prompt must not change overnight.
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, date_string="26 Jul 2024"
        )
    except Exception as error:  # a template is a program from outside: whatever it does wrong is its own
        raise UserError(
            f"the chat template refuses prompt {prompt.id} of {prompt.source} "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): mend one of the two"
        ) from error
    return list(ids)
