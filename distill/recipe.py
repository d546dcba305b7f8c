"""A recipe: one YAML file that says everything about a run, checked whole before any work.

The settings of each part stand beside that part; this module composes them, checks what concerns several
parts at once, and tells the user every mistake together, each with its line and a near miss. There is no
field for a token or a password: access to a hub comes from the environment or `hf auth login`.
"""

import difflib
import inspect
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from data.errors import UserError
from data.prompts import PromptSource, Splits
from data.sample import SampleConfig
from distill.drafter import DraftConfig
from distill.export import ExportConfig
from distill.models import TargetConfig
from distill.recipe_checks import CROSS_CHECKS
from distill.recipe_file import Keys, Problem, RecipeError, RecipeText, dotted, parse_value, read_recipe_text
from distill.redact import redact
from distill.train import TrainConfig
from evaluation.evaluate import EvaluateConfig, ServingConfig

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SECRET = re.compile(r"token|secret|password|api_?key", re.IGNORECASE)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(_Section):
    """Where prompts come from and how they are split."""

    prompts: list[PromptSource] = Field(min_length=1)
    max_prompt_tokens: int = Field(gt=0, le=1_000_000)
    splits: Splits


class EstimateConfig(_Section):
    """What preflight cannot read without a hub: the size of the models, and the GPU hours of a whole run."""

    target_parameters: int = Field(gt=0)
    draft_parameters: int = Field(gt=0)
    target_hidden_size: int = Field(gt=0)
    draft_hidden_size: int | None = Field(default=None, gt=0)
    """The target's where it is not said, as heads and pruned drafters have it."""
    gpu_hours: float = Field(default=0, ge=0)


class Recipe(_Section):
    """Everything about a run. `name` is the file's name without its ending."""

    name: str
    description: str = ""
    seed: int = Field(default=0, ge=0, lt=2**31)
    target: TargetConfig
    draft: DraftConfig
    data: DataConfig
    sample: SampleConfig
    train: TrainConfig
    serving: ServingConfig
    evaluate: EvaluateConfig
    export: ExportConfig
    estimate: EstimateConfig | None = None

    def resolved(self) -> dict[str, Any]:
        """The recipe as plain data with every default written out; `name` is left to the file's name."""
        return self.model_dump(mode="json", by_alias=True, exclude={"name"})

    def resolved_yaml(self) -> str:
        """The recipe with every default written out, in a form that `load_recipe` reads back as the same
        recipe.
        """
        body = yaml.safe_dump(self.resolved(), sort_keys=False, allow_unicode=True, width=100)
        return f"# Recipe {self.name}, resolved.\n{body}"


def recipe_names() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe: a name inside recipes/, or the path of an existing .yaml file.

    Raises `UserError` for a name with other characters, for one that leaves recipes/, and for an unknown one,
    with the nearest name and the list.
    """
    if name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
        if not path.is_file():
            raise UserError(
                f"no recipe file {name_or_path}; give an existing .yaml file or one of {_listed()}"
            )
    else:
        path = RECIPES / f"{name_or_path}.yaml"
        if not NAME.fullmatch(name_or_path):
            raise UserError(
                f"recipe name {name_or_path!r} may hold only letters, digits, '.', '_' and '-'; "
                f"the recipes are {_listed()}"
            )
        if not path.is_file() or not path.resolve().is_relative_to(RECIPES):
            raise UserError(
                f"no recipe {name_or_path!r}{_hint(name_or_path, recipe_names())}; there are {_listed()}"
            )
    if not NAME.fullmatch(path.stem):
        raise UserError(
            f"recipe file name {path.stem!r} may hold only letters, digits, '.', '_' and '-': rename it"
        )
    return path


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and check a recipe.

    Args:
        name_or_path: as `find_recipe` takes it.
        overrides: "a.b=value" each, the value read as YAML; later ones win.

    Raises:
        UserError: there is no such recipe.
        RecipeError: its text, an override or a value is wrong; all problems are in the one message.
    """
    path = find_recipe(name_or_path)
    text = read_recipe_text(path)
    problems: list[Problem] = []
    for override in overrides:
        _apply(override, text, problems)
    sections = _validate_sections(text, problems)
    problems += _cross_problems(text, sections)
    if problems:
        raise RecipeError(path.stem, problems)
    return Recipe(name=path.stem, **sections)


def _listed() -> str:
    return ", ".join(recipe_names())


def _hint(word: str, known: Sequence[str]) -> str:
    # The initials of several words before like spellings: lr is learning_rate, though lora is nearer
    short = [name for name in known if len(word) > 1 and word == "".join(x[:1] for x in name.split("_"))]
    near = short or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


# --- overrides ------------------------------------------------------------------------------------


def _apply(override: str, text: RecipeText, problems: list[Problem]) -> None:
    path, equals, source = override.partition("=")
    label = f"--set {path.strip()}"
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        problems.append(Problem(f"--set {override}", "", "write it as --set section.key=value"))
        return
    for end in range(1, len(keys) + 1):
        known = _known_keys(keys[: end - 1])
        if keys[end - 1] not in known:
            problems.append(_unknown(label, keys[:end], known))
            return
    try:
        value = parse_value(source)
    except ValueError as error:
        problems.append(Problem(label, dotted(keys), f"{source!r}: {error}"))
        return
    section = text.values
    for key in keys[:-1]:
        if not isinstance(section.get(key), dict):
            section[key] = {}
        section = section[key]
    section[keys[-1]] = value
    text.overrides[keys] = label


def _unknown(where: str, keys: Keys, known: Sequence[str]) -> Problem:
    key = str(keys[-1])
    if SECRET.search(key) and not difflib.get_close_matches(key, known, n=1, cutoff=0.8):
        problem = (
            "recipes hold no secrets: use the environment or `hf auth login`, and take it out of the file"
        )
    elif not known:
        problem = "unknown key: this setting has no parts"
    else:
        problem = f"unknown key{_hint(key, known) or '; known here: ' + ', '.join(known)}"
    return Problem(where, dotted(keys), problem)


def _known_keys(keys: Keys) -> list[str]:
    """The keys that may stand in the section at `keys`; none when it is not a section."""
    models: list[type[BaseModel]] = [Recipe]
    for key in keys:
        if isinstance(key, int):  # an item of a list: its model was found under the list's key
            continue
        annotations = [
            field.annotation
            for model in models
            for name, field in model.model_fields.items()
            if key in (name, field.alias)
        ]
        models = [model for annotation in annotations for model in _models_in(annotation)]
    names = {field.alias or name for model in models for name, field in model.model_fields.items()}
    return sorted(names - {"name"}) if not keys else sorted(names)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models_in(part)]


# --- checks ---------------------------------------------------------------------------------------


def _validate_sections(text: RecipeText, problems: list[Problem]) -> dict[str, Any]:
    """Each section on its own, so that one bad section does not hide what is wrong between the others."""
    known = _known_keys(())
    for key in text.values:
        if key not in known:
            problems.append(_unknown(text.where((key,)), (key,), known))
    sections: dict[str, Any] = {}
    for name in known:
        field = Recipe.model_fields[name]
        if name not in text.values:
            if field.is_required():
                problems.append(Problem(text.file, name, "this section is missing"))
            continue
        # The annotation together with the field's bounds.
        annotated: Any = Annotated[field.annotation, field]  # type: ignore[name-defined]
        try:
            sections[name] = TypeAdapter(annotated).validate_python(text.values[name], strict=True)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                problems.append(_describe(text, (name, *detail["loc"]), detail))
    return sections


def _describe(text: RecipeText, keys: Keys, detail: Any) -> Problem:
    where = text.where(keys)
    if detail["type"] == "extra_forbidden":
        return _unknown(where, keys, _known_keys(keys[:-1]))
    if detail["type"] == "missing":
        return Problem(where, dotted(keys), "missing; give it a value")
    message = detail["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    given = detail["input"]
    if isinstance(given, (dict, list)):
        return Problem(where, dotted(keys), message)
    near = ""
    if detail["type"] == "literal_error":
        near = _hint(str(given), re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
    given = redact(repr(given))  # a password in an address has no place in a log of ours either
    shown = given if len(given) <= 60 else given[:57] + "..."
    return Problem(where, dotted(keys), f"{message}, not {shown}{near}")


def _cross_problems(text: RecipeText, sections: dict[str, Any]) -> list[Problem]:
    problems = []
    for check in CROSS_CHECKS:
        needed = list(inspect.signature(check).parameters)
        if all(name in sections for name in needed):
            for path, problem in check(*(sections[name] for name in needed)):
                problems.append(Problem(text.where(tuple(path.split("."))), path, problem))
    return problems
