"""Reading a recipe's YAML: plain data, with the line of every key, and every mistake of the text at once.

A recipe is data, so only plain YAML is taken: no tags, no anchors (a few lines of nested aliases unfold to
gigabytes), no key twice (YAML would keep the last one silently), at most 64 kB and 20 levels.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data.errors import UserError
from distill.redact import redact

MAX_BYTES = 64 * 1024
MAX_DEPTH = 20
SECRET_VALUE = "holds a token or password: recipes hold no secrets, so use the environment and take it out"

Keys = tuple[str | int, ...]
"""A place in a recipe, such as ("data", "prompts", 0)."""


@dataclass(frozen=True)
class Problem:
    """One mistake: where it stands ("file:line" or the override), the dotted path, and what is wrong."""

    where: str
    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.path}: {self.text}" if self.path else f"{self.where}: {self.text}"


class RecipeError(UserError):
    """All the problems of one recipe, for the user to mend in one go."""

    def __init__(self, name: str, problems: list[Problem]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"recipe {name}: {count}", *(f"  {problem}" for problem in problems)]))


@dataclass
class RecipeText:
    """The values of a recipe, and where each of them was written."""

    file: str
    values: dict[str, Any]
    lines: dict[Keys, int] = field(default_factory=dict)
    overrides: dict[Keys, str] = field(default_factory=dict)

    def where(self, keys: Keys) -> str:
        """The override that set `keys`, or "file:line" of the nearest written ancestor of it.

        An override replaces all that the file says below it, so it comes first whichever is nearer.
        """
        ancestors = [keys[:end] for end in range(len(keys), -1, -1)]
        if override := next(filter(None, map(self.overrides.get, ancestors)), None):
            return override
        line = next(filter(None, map(self.lines.get, ancestors)), None)
        return f"{self.file}:{line}" if line else self.file


class _Loader(yaml.SafeLoader):
    """safe_load, except that 1e-3 is a number and a date stays text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_recipe_text(path: Path) -> RecipeText:
    """Parse the YAML file at `path`. Raises `RecipeError` naming the line of everything that is not plain
    YAML.
    """
    name = path.stem
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise RecipeError(name, [Problem(str(path), "", "larger than 64 kB, which no recipe is")])
        source = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            name, [Problem(str(path), "", f"not UTF-8 text (byte {error.start}); save it as UTF-8")]
        ) from error
    except OSError as error:
        raise UserError(f"cannot read recipe {path}: {error.strerror}") from error

    text = RecipeText(str(path), {})
    problems = _unsafe_events(source, text.file)
    if problems:
        raise RecipeError(name, problems)
    values = _construct(source, text, problems)
    if not problems and not isinstance(values, dict):
        problems.append(
            Problem(text.file, "", "not a recipe: sections such as `target:` are expected at the top")
        )
    if problems:
        raise RecipeError(name, problems)
    text.values = values
    return text


def parse_value(source: str) -> Any:
    """The value of an override, read as YAML. `ValueError` with one sentence when it is not plain YAML."""
    if problems := _unsafe_events(source, "value"):
        raise ValueError(problems[0].text)
    problems = []
    value = _construct(source, RecipeText("value", {}), problems)
    if problems:
        raise ValueError(problems[0].text)
    return value


def dotted(keys: Keys) -> str:
    """("data", "prompts", 0) -> "data.prompts.0"."""
    return ".".join(str(key) for key in keys)


def _unsafe_events(source: str, file: str) -> list[Problem]:
    # Read as events first: the parser keeps no recursion and unfolds no alias, so hostile input costs nothing
    # here.
    problems, depth = [], 0
    try:
        event: Any
        for event in yaml.parse(source, Loader=_Loader):
            place = f"{file}:{event.start_mark.line + 1}"
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                problems.append(
                    Problem(place, "", "anchors (&, *) are not part of a recipe: write the value out")
                )
            if getattr(event, "tag", None):
                problems.append(Problem(place, "", f"tags such as {event.tag!r} are not part of a recipe"))
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > MAX_DEPTH:
                problems.append(Problem(place, "", f"nested deeper than {MAX_DEPTH} levels"))
                break
    except yaml.YAMLError as error:
        problems.append(_syntax_problem(error, file))
    return problems


def _syntax_problem(error: yaml.YAMLError, file: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    place = f"{file}:{mark.line + 1}" if mark else file
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return Problem(place, "", f"not valid YAML: {reason}")


def _construct(source: str, text: RecipeText, problems: list[Problem]) -> Any:
    loader = _Loader(source)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _walk(node, (), text, problems)
        values = loader.construct_document(node)
        _refuse_odd_values(values, (), text, problems)
        return values
    except yaml.YAMLError as error:
        problems.append(_syntax_problem(error, text.file))
    except ValueError as error:  # int() of thousands of digits
        problems.append(Problem(text.file, "", f"a value cannot be read: {error}"))
    finally:
        loader.dispose()
    return None


def _walk(node: yaml.Node, keys: Keys, text: RecipeText, problems: list[Problem]) -> None:
    text.lines.setdefault(keys, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*keys, index), text, problems)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            where = f"{text.file}:{line}"
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                problems.append(Problem(where, dotted(keys), "a key must be a plain word"))
                continue
            key = key_node.value
            if key in seen:
                problem = f"given twice (first on line {seen[key]}); keep one"
                problems.append(Problem(where, dotted((*keys, key)), problem))
            seen.setdefault(key, line)
            text.lines.setdefault((*keys, key), line)
            _walk(value_node, (*keys, key), text, problems)


def _refuse_odd_values(value: Any, keys: Keys, text: RecipeText, problems: list[Problem]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_odd_values(item, (*keys, key), text, problems)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_odd_values(item, (*keys, index), text, problems)
    elif isinstance(value, str) and redact(value) != value:
        problems.append(Problem(text.where(keys), dotted(keys), SECRET_VALUE))
    elif isinstance(value, float) and not math.isfinite(value):
        problems.append(Problem(text.where(keys), dotted(keys), "not a finite number"))
    elif isinstance(value, int) and abs(value) >= 2**63:
        problems.append(Problem(text.where(keys), dotted(keys), "a number too large for any setting"))
