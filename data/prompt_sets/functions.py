"""Prompts whose answer is a small routine function over a record."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template


def _fields(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 2, 3)
    return {"name": name.lower(), "fields": words.listed([f.name for f in fields])}


def _check(dice: Dice) -> Fill:
    name = dice.one(tuple(words.ENTITIES))
    field = words.number_field(dice, name)
    return {
        "name": name.lower(),
        "field": field.name,
        "comparison": dice.one(("greater than", "less than", "at least")),
        "value": field.value(dice),
    }


def _many(dice: Dice) -> Fill:
    name = dice.one(tuple(words.ENTITIES))
    return {
        "many": words.plural(name),
        "field": words.number_field(dice, name).name,
        "label": words.text_field(dice, name).name,
    }


TEMPLATES = (
    Template(
        "function_create",
        "function",
        (
            "Write a Python function create_{name} that takes {fields} and returns a dictionary.",
            "Write a Python function make_{name} that takes {fields} and returns a dict. Code only.",
            "Create a Python function that takes {fields} and returns a {name} as a dictionary. Only the "
            "function.",
        ),
        _fields,
    ),
    Template(
        "function_print",
        "function",
        (
            "Write a Python function show_{name} that takes {fields} and prints them.",
            "Write a Python function that prints {fields} of a {name}. Code only.",
            "Write a Python function that prints the {fields} of a {name}.",
        ),
        _fields,
    ),
    Template(
        "function_check",
        "function",
        (
            "Write a Python function that checks if the {field} of a {name} is {comparison} {value}. "
            "Code only.",
            "Create a Python function for a {name}: is its {field} {comparison} {value}? Only the function.",
            "Write a Python function that returns True if the {name} has a {field} {comparison} {value}.",
        ),
        _check,
    ),
    Template(
        "function_sort",
        "function",
        (
            "Create a Python function that sorts {many} by their {field} and {label}. Only the function.",
            "Write a Python function that returns the {label} of the {many} sorted by {field}.",
            "Write a Python function that sorts a list of {many} by {field}, then by {label}. Code only.",
        ),
        _many,
    ),
    Template(
        "function_average",
        "function",
        (
            "Write a Python function that computes the average {field} of {many} per {label}. Only the "
            "function.",
            "Write a Python function that groups {many} by {label} and computes the average {field}. "
            "Only the function.",
        ),
        _many,
    ),
    Template(
        "javascript_function",
        "function",
        (
            "Write a JavaScript function that takes {fields} and returns a {name} object. Code only.",
            "Create a JavaScript function make_{name} with the parameters {fields}. Only the function.",
        ),
        _fields,
        held_out=True,
    ),
)
