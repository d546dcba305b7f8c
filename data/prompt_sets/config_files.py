"""Prompts whose answer is a record in a plain text format: YAML, XML, INI, lists and tables."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template


def _record(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 2, 4)
    mark = dice.one((": ", " = ", " "))
    return {"entity": name.lower(), "pairs": ", ".join(f"{f.name}{mark}{f.value(dice)}" for f in fields)}


def _settings(dice: Dice) -> Fill:
    pairs = (
        ("port", str(dice.between(1024, 9999))),
        ("host", dice.one(words.HOSTS)),
        ("debug", dice.one(("true", "false"))),
        ("timeout", str(dice.between(2, 90))),
        ("retries", str(dice.between(1, 9))),
        ("workers", str(dice.between(1, 32))),
        ("region", dice.one(words.CITIES)),
        ("log_level", dice.one(("debug", "info", "warning", "error"))),
        ("cache_size", str(dice.between(2, 512))),
        ("user", words.first_name(dice)),
    )
    mark = dice.one((" ", " = ", ": "))
    values = [f"{key}{mark}{value}" for key, value in dice.some(pairs, dice.between(3, 4))]
    return {"service": dice.one(words.SERVICES), "values": ", ".join(values)}


TEMPLATES = (
    Template(
        "yaml_record",
        "config",
        (
            "Convert this {entity} to YAML: {pairs}.",
            "Convert the following {entity} to YAML format: {pairs}.",
            "Convert to YAML: a {entity} with {pairs}.",
            "Convert this {entity} to YAML. {pairs}",
        ),
        _record,
    ),
    Template(
        "yaml_settings",
        "config",
        (
            "Convert the settings of {service} to YAML: {values}",
            "Convert the settings of the {service} service to YAML: {values}.",
        ),
        _settings,
    ),
    Template(
        "query_string",
        "config",
        (
            "Convert this {entity} to a URL query string: {pairs}.",
            "Convert the following {entity} to a URL query string: {pairs}.",
        ),
        _record,
    ),
    Template(
        "environment_variables",
        "config",
        (
            "Convert the settings of {service} to environment variables: {values}.",
            "Write the environment variables of {service}: {values}. Only the variables.",
        ),
        _settings,
        held_out=True,
    ),
    Template(
        "xml_record",
        "config",
        ("Convert this {entity} to XML: {pairs}.", "Convert to XML: a {entity} with {pairs}."),
        _record,
        held_out=True,
    ),
)
