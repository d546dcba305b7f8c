"""Prompts whose answer is JSON: mostly a sentence from which a few keys are to be taken."""

from collections.abc import Callable, Sequence

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template

_WRITE = "{text}. Write a JSON object with {keys}."
_WRITE_FOR = "{text}. Write a JSON object with {keys} for this {kind}."
_DESCRIBE = "Write a JSON object that describes a {kind} with {keys}. {text}. Only the JSON."
_EXTRACT = "{text}. Extract {keys} in JSON format."
_ASK = "{text}. What are the {keys}? Answer in JSON."


def _sentence(
    kind: str, forms: Sequence[str], throw: Callable[[Dice], dict[str, str]]
) -> Callable[[Dice], Fill]:
    """A fill of a sentence that holds all values of `throw` and a choice of two or more of its keys."""

    def fill(dice: Dice) -> Fill:
        values = throw(dice)
        keys = dice.some(tuple(values), dice.between(min(3, len(values)), len(values)))
        return {"kind": kind, "text": dice.one(forms).format(**values), "keys": words.listed(keys)}

    return fill


_person = _sentence(
    "person",
    (
        "{name} is {age} years old, lives in {city} and works as a {job}",
        "{name}, {age}, is a {job} in {city}",
        "My friend {name} is a {age} year old {job} from {city}",
    ),
    lambda dice: {
        "name": words.person(dice),
        "age": str(dice.between(18, 80)),
        "city": dice.one(words.CITIES),
        "job": dice.one(words.JOBS),
    },
)
_product = _sentence(
    "product",
    (
        "The {color} {name} made of {material} costs {price} dollars",
        "We sell a {name} in {color}, made of {material}, for {price} dollars",
        "A {material} {name} ({color}) is {price} dollars",
    ),
    lambda dice: {
        "name": dice.one(words.PRODUCTS),
        "color": dice.one(words.COLORS),
        "price": str(dice.between(3, 90)),
        "material": dice.one(words.MATERIALS),
    },
)
_order = _sentence(
    "order",
    (
        "{customer} orders {product}, {quantity} pieces at {price} dollars each",
        "{customer} wants {quantity} of the product {product} for {price} dollars",
        "Please send {customer} {quantity} pieces of {product}, {price} dollars each",
    ),
    lambda dice: {
        "customer": words.person(dice),
        "product": dice.one(words.PRODUCTS),
        "quantity": str(dice.between(2, 12)),
        "price": str(dice.between(3, 90)),
    },
)
_movie = _sentence(
    "movie",
    (
        "{title} is a {genre} of {year} by {director}",
        "In {year}, {director} made the {genre} {title}",
        "The {genre} {title} ({year}) was directed by {director}",
    ),
    lambda dice: {
        "title": dice.one(words.TITLES),
        "director": words.person(dice),
        "year": str(dice.between(1960, 2024)),
        "genre": dice.one(words.GENRES),
    },
)
_server = _sentence(
    "server",
    (
        "The server {host} in {region} has {memory} GB of memory and listens on port {port}",
        "{host} runs in {region} on port {port} with {memory} GB",
        "Host {host}, port {port}, {memory} GB, region {region}",
    ),
    lambda dice: {
        "host": dice.one(words.HOSTS),
        "port": str(dice.between(1000, 9999)),
        "memory": str(dice.between(2, 64)),
        "region": dice.one(words.CITIES),
    },
)
_event = _sentence(
    "event",
    (
        "The {title} takes place in {city} on {day} at {time}",
        "On {day} at {time} we hold the {title} in {city}",
        "{city} hosts the {title} on {day}, {time}",
    ),
    lambda dice: {
        "title": dice.one(words.EVENTS),
        "city": dice.one(words.CITIES),
        "day": dice.one(words.DAYS),
        "time": f"{dice.between(8, 20)}:{dice.one(('00', '30'))}",
    },
)


def _pairs(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 2, 4)
    mark = dice.one((": ", " = ", " "))
    return {"entity": name.lower(), "pairs": ", ".join(f"{f.name}{mark}{f.value(dice)}" for f in fields)}


def _people(dice: Dice) -> Fill:
    names = dice.some(words.FIRST_NAMES, dice.between(2, 3))
    measure, low, high = dice.one(
        (("score", 10, 99), ("age", 18, 80), ("points", 1, 60), ("salary", 2000, 7000))
    )
    return {
        "rows": words.listed([f"{name} ({dice.between(low, high)})" for name in names]),
        "measure": measure,
    }


def _csv_rows(dice: Dice) -> Fill:
    _, fields = words.entity(dice, 2, 3)
    rows = [",".join(f.value(dice) for f in fields) for _ in range(2)]
    return {"csv": "\n".join([",".join(f.name for f in fields), *rows])}


def _schema(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 3, 4)
    kinds = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "date": "string"}
    return {"entity": name.lower(), "fields": ", ".join(f"{f.name} ({kinds[f.type]})" for f in fields)}


TEMPLATES = (
    Template(
        "json_person",
        "json",
        (
            _WRITE,
            _EXTRACT,
            _ASK,
            "Read the text and give {keys} as JSON. {text}.",
            "Create a JSON object with the fields {keys} for this {kind}: {text}.",
        ),
        _person,
    ),
    Template("json_product", "json", (_DESCRIBE, _WRITE, _WRITE_FOR, _EXTRACT), _product),
    Template("json_order", "json", (_DESCRIBE, _ASK, _WRITE_FOR), _order),
    Template("json_movie", "json", (_DESCRIBE, _ASK, _WRITE), _movie),
    Template("json_server", "json", (_WRITE, _ASK, _WRITE_FOR), _server),
    Template("json_event", "json", (_WRITE_FOR, _WRITE, _DESCRIBE, _EXTRACT), _event),
    Template(
        "json_pairs",
        "json",
        (
            "Write a JSON object that describes a {entity}: {pairs}. Only the JSON.",
            "Write one JSON object that describes this {entity}: {pairs}. Only the JSON.",
        ),
        _pairs,
    ),
    Template(
        "json_people",
        "json",
        (
            "Write a JSON array of people with name and {measure}: {rows}. Only the JSON.",
            "Write a JSON object that maps each name to its {measure}: {rows}.",
            "Write a JSON list of people with name and {measure}: {rows}.",
            "Write a JSON object with the {measure} of each person: {rows}. Only the JSON.",
        ),
        _people,
    ),
    Template(
        "json_from_csv",
        "json",
        ("Convert this CSV to JSON:\n{csv}", "Convert this CSV to JSON. Only the JSON.\n{csv}"),
        _csv_rows,
        held_out=True,
    ),
    Template(
        "json_schema",
        "json",
        (
            "Define the JSON schema of a {entity} with the properties {fields}. Only the JSON.",
            "Define the JSON schema of a {entity} with the properties {fields}.",
        ),
        _schema,
        held_out=True,
    ),
)
