"""Prompts whose answer is class boilerplate in one of several languages."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template

_PYTHON = {"str": "str", "int": "int", "float": "float", "bool": "bool", "date": "date"}
_JAVA = {"str": "String", "int": "int", "float": "double", "bool": "boolean", "date": "LocalDate"}
_TYPESCRIPT = {"str": "string", "int": "number", "float": "number", "bool": "boolean", "date": "Date"}
_GO = {"str": "string", "int": "int", "float": "float64", "bool": "bool", "date": "time.Time"}
_RUST = {"str": "String", "int": "i32", "float": "f64", "bool": "bool", "date": "String"}
_CSHARP = {"str": "string", "int": "int", "float": "decimal", "bool": "bool", "date": "DateTime"}
_CPP = {"str": "std::string", "int": "int", "float": "double", "bool": "bool", "date": "std::string"}
_KOTLIN = {"str": "String", "int": "Int", "float": "Double", "bool": "Boolean", "date": "LocalDate"}


def _typed(kinds: dict[str, str], low: int, high: int) -> "_Filler":
    return _Filler(kinds, low, high)


class _Filler:
    """Throws a class name and its typed fields, in one of three ways of writing them."""

    def __init__(self, kinds: dict[str, str], low: int, high: int) -> None:
        self.kinds, self.low, self.high = kinds, low, high

    def __call__(self, dice: Dice) -> Fill:
        name, fields = words.entity(dice, self.low, self.high)
        style = dice.one(("{name} ({kind})", "{name}: {kind}", "{kind} {name}"))
        return {"name": name, "fields": ", ".join(style.format(name=f.name, kind=self.kinds[f.type]) for f in fields)}


def _bare(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 2, 4)
    return {"name": name, "fields": words.listed([f.name for f in fields])}


def _enum(dice: Dice) -> Fill:
    title, pool = dice.one(
        (
            ("Color", words.COLORS), ("Status", words.STATUSES), ("Genre", words.GENRES), ("Sport", words.SPORTS),
            ("Fruit", words.FRUITS), ("Material", words.MATERIALS), ("Room", words.ROOMS), ("Weekday", words.DAYS),
            ("Team", words.TEAMS), ("City", words.CITIES), ("Service", words.SERVICES), ("Language", words.LANGUAGES),
        )
    )  # fmt: skip
    return {"name": title, "values": words.listed(dice.some(pool, dice.between(3, 6)))}


def _with_method(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 2, 3)
    verb = dice.one(("describe", "summary", "label", "to_text", "show", "report"))
    return {"name": name, "fields": words.listed([f.name for f in fields]), "method": verb}


TEMPLATES = (
    Template(
        "python_dataclass",
        "class",
        (
            "Write a Python dataclass {name} with fields {fields}. Code only.",
            "Python dataclass {name}: {fields}. Only the code.",
            "Code only: a dataclass named {name} in Python, fields {fields}.",
            "I need a Python @dataclass for {name} ({fields}). Just the code, no explanation.",
        ),
        _typed(_PYTHON, 3, 5),
    ),
    Template(
        "python_class",
        "class",
        (
            "Write a Python class {name} whose __init__ takes {fields}. Code only.",
            "Python class {name} with attributes {fields}, set in the constructor. Only the code.",
            "Code only: class {name} in Python with {fields}.",
        ),
        _bare,
    ),
    Template(
        "python_class_method",
        "class",
        (
            "Write a Python class {name} ({fields}) with a method {method} that returns them in a string. Code only.",
            "Code only: Python class {name} with {fields} and a method {method}() that returns one line of text.",
            "Python class {name}, attributes {fields}, one method {method}. No explanation.",
        ),
        _with_method,
    ),
    Template(
        "python_enum",
        "class",
        (
            "Write a Python Enum {name} with the members {values}. Code only.",
            "Code only: Python enum {name}: {values}.",
            "An Enum class {name} in Python for {values}. Just the code.",
        ),
        _enum,
    ),
    Template(
        "java_class",
        "class",
        (
            "Write a Java class {name} with the fields {fields} and a constructor, no getters. Code only.",
            "Code only: Java class {name}, private fields {fields}, one constructor.",
            "Java: class {name} with {fields} and a constructor. No explanation.",
        ),
        _typed(_JAVA, 2, 3),
    ),
    Template(
        "typescript_interface",
        "class",
        (
            "Write a TypeScript interface {name} with {fields}. Code only.",
            "TypeScript interface {name}: {fields}. Only the code.",
            "Code only: interface {name} in TypeScript with the properties {fields}.",
        ),
        _typed(_TYPESCRIPT, 3, 6),
    ),
    Template(
        "go_struct",
        "class",
        (
            "Write a Go struct {name} with {fields} and json tags. Code only.",
            "Go struct {name}: {fields}. Only the code.",
            "Code only: type {name} struct in Go with the fields {fields}.",
        ),
        _typed(_GO, 3, 5),
    ),
    Template(
        "csharp_class",
        "class",
        (
            "Write a C# class {name} with the properties {fields}. Code only.",
            "C# class {name}: auto properties {fields}. Only the code.",
            "Code only: a C# class {name} with {fields}.",
        ),
        _typed(_CSHARP, 3, 5),
    ),
    Template(
        "rust_struct",
        "class",
        (
            "Write a Rust struct {name} with {fields}. Code only.",
            "Rust struct {name}: {fields}. Only the code.",
            "Code only: pub struct {name} in Rust, fields {fields}.",
        ),
        _typed(_RUST, 3, 5),
    ),
    Template(
        "cpp_struct",
        "class",
        (
            "Write a C++ struct {name} with {fields}. Code only.",
            "C++ struct {name}: {fields}. Only the code.",
            "Code only: struct {name} in C++ with the members {fields}.",
        ),
        _typed(_CPP, 3, 5),
    ),
    Template(
        "javascript_class",
        "class",
        (
            "Write a JavaScript class {name} with a constructor for {fields}. Code only.",
            "Code only: class {name} in JavaScript with {fields}.",
        ),
        _bare,
        held_out=True,
    ),
    Template(
        "kotlin_data_class",
        "class",
        (
            "Write a Kotlin data class {name} with {fields}. Code only.",
            "Kotlin data class {name}: {fields}. Only the code.",
        ),
        _typed(_KOTLIN, 3, 5),
        held_out=True,
    ),
)
