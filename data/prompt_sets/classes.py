"""Prompts whose answer is class boilerplate in one of several languages."""

from collections.abc import Callable

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template

_TYPESCRIPT = {"str": "string", "int": "number", "float": "number", "bool": "boolean", "date": "Date"}
_GO = {"str": "string", "int": "int", "float": "float64", "bool": "bool", "date": "time.Time"}
_RUST = {"str": "String", "int": "i32", "float": "f64", "bool": "bool", "date": "String"}


def _bare(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 2, 4)
    return {"name": name, "fields": words.listed([f.name for f in fields])}


def _typed(kinds: dict[str, str]) -> Callable[[Dice], Fill]:
    """A class name and its typed fields, in one of three ways of writing them."""

    def fill(dice: Dice) -> Fill:
        name, fields = words.entity(dice, 2, 4)
        style = dice.one(("{name} ({kind})", "{name}: {kind}", "{kind} {name}"))
        return {
            "name": name,
            "fields": ", ".join(style.format(name=f.name, kind=kinds[f.type]) for f in fields),
        }

    return fill


def _subclass(dice: Dice) -> Fill:
    return {**_bare(dice), "parent": dice.one(("Item", "Record", "Base", "Entity", "Model"))}


def _enum(dice: Dice) -> Fill:
    title, pool = dice.one(
        (
            ("Color", words.COLORS),
            ("Status", words.STATUSES),
            ("Genre", words.GENRES),
            ("Sport", words.SPORTS),
            ("Fruit", words.FRUITS),
            ("Material", words.MATERIALS),
            ("Room", words.ROOMS),
            ("Weekday", words.DAYS),
            ("Team", words.TEAMS),
            ("City", words.CITIES),
            ("Service", words.SERVICES),
            ("Language", words.LANGUAGES),
        )
    )
    return {"name": title, "values": words.listed(dice.some(pool, dice.between(3, 5)))}


def _record(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 3, 4)
    return {"name": name.lower(), "pairs": ", ".join(f"{f.name} {f.value(dice)}" for f in fields)}


TEMPLATES = (
    Template(
        "python_class",
        "class",
        (
            "Write a Python class {name} with {fields}. Code only.",
            "Write a Python class {name} that takes {fields} in its constructor. Only the class.",
            "Write a Python class {name} whose constructor takes {fields}.",
            "Write a Python class {name} with the attributes {fields}. Code only.",
        ),
        _bare,
    ),
    Template(
        "python_class_print",
        "class",
        (
            "Write a Python class {name} with the attributes {fields} and a method that prints them. "
            "Only the class.",
            "Create a class {name} in Python with {fields} and a __str__ method. Code only.",
            "Write a Python class {name} with {fields} and a __repr__ method. Only the class.",
        ),
        _bare,
    ),
    Template(
        "python_dataclass",
        "class",
        (
            "Create a Python dataclass named {name} with the fields {fields}. Only the code.",
            "Write a Python dataclass {name} with {fields}. Only the class.",
            "Create a dataclass {name} in Python with {fields}. Code only.",
        ),
        _bare,
    ),
    Template(
        "python_enum",
        "class",
        (
            "Create an Enum class {name} in Python with {values}.",
            "Create an Enum class {name} in Python with the values {values}.",
        ),
        _enum,
    ),
    Template(
        "python_subclass",
        "class",
        (
            "Create a Python subclass {name} of {parent} with the attributes {fields}.",
            "Create a Python subclass {name} of {parent} with {fields}.",
        ),
        _subclass,
    ),
    Template(
        "python_dict",
        "class",
        (
            "Write the {name} as a Python dictionary: {pairs}.",
            "Write a Python dictionary called {name} with {pairs}. Only the dictionary.",
            "Write a Python dictionary for a {name} with {pairs}.",
            "Define a Python dictionary {name} with the keys and values {pairs}.",
        ),
        _record,
    ),
    Template(
        "java_class",
        "class",
        (
            "Create a Java class {name} with the private fields {fields}. Code only.",
            "Create a Java class {name} with private fields {fields} and a constructor. Only the class.",
        ),
        _bare,
    ),
    Template(
        "typescript_interface",
        "class",
        (
            "Write a TypeScript interface {name} with {fields}. Only the interface.",
            "Write a TypeScript interface {name} with the properties {fields}. Only the interface.",
            "Define a TypeScript interface {name} with the properties {fields}. Only the interface.",
        ),
        _typed(_TYPESCRIPT),
    ),
    Template(
        "go_struct",
        "class",
        (
            "Create a struct {name} in Go with the fields {fields}. Code only.",
            "Create a struct {name} in Go with {fields}. Code only.",
        ),
        _typed(_GO),
    ),
    Template(
        "rust_struct",
        "class",
        (
            "Write a Rust struct {name} with the fields {fields}. Only the struct.",
            "Create a struct {name} in Rust with the fields {fields}. Only the struct.",
        ),
        _typed(_RUST),
    ),
    Template(
        "csharp_class",
        "class",
        (
            "Create a C# class {name} with the properties {fields}. Only the class.",
            "Define a C# class {name} that has {fields}. Only the class.",
        ),
        _bare,
    ),
    Template(
        "c_struct",
        "class",
        (
            "Write a C struct {name} with the members {fields}. Only the struct.",
            "Define a struct {name} in C with the members {fields}. Only the struct.",
        ),
        _bare,
    ),
    Template(
        "javascript_class",
        "class",
        (
            "Write a JavaScript class {name} with the properties {fields}. Only the class.",
            "Create a JavaScript class called {name} with {fields}. Code only.",
        ),
        _bare,
        held_out=True,
    ),
    Template(
        "kotlin_class",
        "class",
        (
            "Create a Kotlin class called {name} with {fields}. Code only.",
            "Write a Kotlin class {name} with the properties {fields}. Only the class.",
        ),
        _bare,
        held_out=True,
    ),
)
