"""Prompts whose answer is a configuration file."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template


def _values(dice: Dice, count: int) -> list[str]:
    pairs = (
        ("port", str(dice.between(1024, 9999))),
        ("host", dice.one(words.HOSTS)),
        ("debug", dice.one(("true", "false"))),
        ("timeout", str(dice.between(2, 90))),
        ("retries", str(dice.between(1, 9))),
        ("workers", str(dice.between(1, 32))),
        ("region", dice.one(words.CITIES).lower()),
        ("log_level", dice.one(("debug", "info", "warning", "error"))),
        ("cache_size", str(dice.between(2, 512))),
        ("user", words.first_name(dice).lower()),
    )
    mark = dice.one((" ", " = ", ": "))
    return [f"{key}{mark}{value}" for key, value in dice.some(pairs, count)]


def _one_service(dice: Dice) -> Fill:
    return {"service": dice.one(words.SERVICES), "values": ", ".join(_values(dice, dice.between(4, 6)))}


def _two_sections(dice: Dice) -> Fill:
    first, second = dice.some(words.SERVICES, 2)
    return {
        "first": first,
        "second": second,
        "first_values": words.listed(_values(dice, dice.between(2, 3))),
        "second_values": words.listed(_values(dice, dice.between(2, 3))),
    }


def _record(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 3, 5)
    return {"entity": name.lower(), "pairs": ", ".join(f"{f.name} {f.value(dice)}" for f in fields)}


def _container(dice: Dice) -> Fill:
    return {
        "service": dice.one(words.SERVICES),
        "image": dice.one(("nginx", "redis", "postgres", "python", "node", "mysql")),
        "port": str(dice.between(1024, 9999)),
        "key": dice.one(("MODE", "LEVEL", "REGION", "OWNER")),
        "value": dice.one(words.HOSTS),
    }


TEMPLATES = (
    Template(
        "yaml_service",
        "config",
        (
            "Write a YAML file for the service {service} with {values}. Only the YAML.",
            "YAML config of {service}: {values}. Only the YAML.",
            "Only YAML: settings for {service}, namely {values}.",
        ),
        _one_service,
    ),
    Template(
        "yaml_record",
        "config",
        (
            "Write this {entity} as YAML: {pairs}. Only the YAML.",
            "{pairs}\nThe {entity} above in YAML, nothing else.",
            "Only YAML: a {entity} with {pairs}.",
        ),
        _record,
    ),
    Template(
        "ini_sections",
        "config",
        (
            "Write an INI file with a section {first} ({first_values}) and a section {second} ({second_values}). Only the file.",
            "INI file, sections [{first}] and [{second}]. {first}: {first_values}. {second}: {second_values}. Only the file.",
            "Only the INI text: [{first}] has {first_values}; [{second}] has {second_values}.",
        ),
        _two_sections,
    ),
    Template(
        "toml_sections",
        "config",
        (
            "Write a TOML file with a table {first} ({first_values}) and a table {second} ({second_values}). Only the TOML.",
            "Only TOML: [{first}] with {first_values}, [{second}] with {second_values}.",
            "TOML config. {first}: {first_values}. {second}: {second_values}. No explanation.",
        ),
        _two_sections,
    ),
    Template(
        "env_file",
        "config",
        (
            "Write a .env file for {service} with {values}. Only the file.",
            "Environment variables in a .env file for {service}: {values}. Only the lines.",
            "Only the .env lines, upper case names, for {service}: {values}.",
        ),
        _one_service,
    ),
    Template(
        "docker_compose",
        "config",
        (
            "Write a docker-compose.yml with a service {service}, image {image}, port {port} and {key}={value}. Only the YAML.",
            "Only YAML: docker compose for {service} ({image}), port {port}, environment {key}={value}.",
        ),
        _container,
        held_out=True,
    ),
    Template(
        "java_properties",
        "config",
        (
            "Write a Java properties file with the prefix {service} for {values}. Only the file.",
            "application.properties, every key starting with {service}.: {values}. Only the lines.",
        ),
        _one_service,
        held_out=True,
    ),
)
