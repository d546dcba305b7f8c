"""Prompts whose answer is JSON."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template


def _pairs(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 3, 5)
    mark = dice.one((": ", " = ", " is "))
    return {"entity": name.lower(), "pairs": ", ".join(f"{f.name}{mark}{f.value(dice)}" for f in fields)}


def _person(dice: Dice) -> Fill:
    who = words.person(dice)
    age, city, job = dice.between(18, 80), dice.one(words.CITIES), dice.one(words.JOBS)
    text = dice.one(
        (
            f"{who} is {age} years old, lives in {city} and works as a {job}",
            f"{who}, a {job} from {city}, turned {age} last week",
            f"The {job} {who} ({age}) moved to {city}",
            f"In {city} we met {who}, who is {age} and a {job}",
        )
    )
    keys = dice.some(("name", "age", "city", "job"), 4)
    return {"text": text, "keys": words.listed(keys)}


def _order(dice: Dice) -> Fill:
    products = dice.some(words.PRODUCTS, dice.between(2, 3))
    items = [f"{dice.between(1, 12)} x {p} at {dice.between(2, 90)}.{dice.one(('00', '50', '90'))}" for p in products]
    return {"who": words.person(dice), "items": words.listed(items), "list": dice.one(("items", "lines", "products"))}


def _event(dice: Dice) -> Fill:
    what, where = dice.one(words.EVENTS), dice.one(words.CITIES)
    day = f"{dice.between(1, 28)} {dice.one(words.MONTHS)} {dice.between(2023, 2026)}"
    hour = f"{dice.between(8, 20)}:{dice.one(('00', '15', '30', '45'))}"
    text = dice.one(
        (
            f"the {what} takes place in {where} on {day} at {hour}",
            f"on {day} we hold the {what} in {where}, starting at {hour}",
            f"{where} hosts the {what}; it begins at {hour} on {day}",
        )
    )
    return {"text": text, "keys": words.listed(dice.some(("title", "city", "date", "time"), 4))}


def _log(dice: Dice) -> Fill:
    level = dice.one(("ERROR", "WARN", "INFO", "DEBUG"))
    text = dice.one(("timeout after {n} ms", "user {n} logged in", "disk {n} percent full", "job {n} finished", "retry {n}"))
    line = f"{words.date(dice)} {level} {dice.one(words.SERVICES)}: {text.format(n=dice.between(2, 99))}"
    return {"line": line}


def _people_list(dice: Dice) -> Fill:
    names = [words.first_name(dice) for _ in range(dice.between(3, 4))]
    measure, low, high = dice.one((("score", 10, 99), ("age", 18, 80), ("points", 1, 60), ("salary", 2000, 7000)))
    return {
        "rows": words.listed([f"{name} {dice.between(low, high)}" for name in dict.fromkeys(names)]),
        "measure": measure,
    }


def _nested(dice: Dice) -> Fill:
    outer, inner = dice.some(list(words.ENTITIES), 2)
    first = dice.some(words.ENTITIES[outer], 2)
    second = dice.some(words.ENTITIES[inner], dice.between(2, 3))
    return {
        "outer": outer.lower(),
        "inner": inner.lower(),
        "first": words.listed([f"{f.name} {f.value(dice)}" for f in first]),
        "second": words.listed([f"{f.name} {f.value(dice)}" for f in second]),
    }


def _settings(dice: Dice) -> Fill:
    values = [
        f"port {dice.between(1024, 9999)}",
        f"host {dice.one(words.HOSTS)}",
        f"debug {dice.one(('on', 'off'))}",
        f"timeout {dice.between(2, 90)}",
        f"retries {dice.between(1, 9)}",
        f"region {dice.one(words.CITIES)}",
        f"theme {dice.one(words.COLORS)}",
        f"language {dice.one(words.LANGUAGES)}",
    ]
    return {"service": dice.one(words.SERVICES), "values": words.listed(dice.some(values, dice.between(3, 5)))}


def _inventory(dice: Dice) -> Fill:
    fruits = dice.some(words.FRUITS, dice.between(3, 5))
    return {
        "place": dice.one(words.ROOMS),
        "stock": words.listed([f"{dice.between(2, 90)} {fruit}" for fruit in fruits]),
    }


def _csv_rows(dice: Dice) -> Fill:
    _, fields = words.entity(dice, 3, 3)
    rows = [",".join(f.value(dice) for f in fields) for _ in range(dice.between(2, 3))]
    return {"csv": "\n".join([",".join(f.name for f in fields), *rows])}


def _schema(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 3, 4)
    kinds = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "date": "string"}
    return {"entity": name.lower(), "fields": ", ".join(f"{f.name} ({kinds[f.type]})" for f in fields)}


TEMPLATES = (
    Template(
        "json_pairs",
        "json",
        (
            "Write this {entity} as a JSON object. Only the JSON.\n{pairs}",
            "Convert to JSON ({entity}): {pairs}. Only the JSON.",
            "Give me a JSON object for a {entity} with {pairs}. Output JSON only.",
            "{pairs}\nTurn the {entity} above into one JSON object, no explanation.",
        ),
        _pairs,
    ),
    Template(
        "json_person",
        "json",
        (
            "Extract {keys} as a JSON object. Only the JSON.\n{text}.",
            "{text}. Return JSON with the keys {keys}, nothing else.",
            "Text: {text}.\nWrite a JSON object with {keys} from the text. Only the JSON.",
            "Fill a JSON object with {keys} from this sentence: {text}. JSON only.",
        ),
        _person,
    ),
    Template(
        "json_order",
        "json",
        (
            "Write this order as JSON with customer and {list} (name, quantity, price). Only the JSON.\n{who} buys {items}.",
            "{who} ordered {items}. Return the order as JSON with customer and a list {list}. Only the JSON.",
            "Order of {who}: {items}. As JSON with the keys customer and {list}, no text around it.",
            "Make JSON from this order, keys customer and {list}: {items}, for {who}. JSON only.",
        ),
        _order,
    ),
    Template(
        "json_event",
        "json",
        (
            "Turn this into a JSON object with {keys}: {text}. Only the JSON.",
            "Note: {text}. Give the JSON with {keys}, nothing else.",
            "Extract {keys} as JSON from: {text}. JSON only.",
            "Calendar entry as JSON ({keys}) for this message: {text}. Only the JSON.",
        ),
        _event,
    ),
    Template(
        "json_log",
        "json",
        (
            "Parse this log line into a JSON object with date, level, service and message. Only the JSON.\n{line}",
            "{line}\nAs JSON with the keys date, level, service, message. Only the JSON.",
            "Log line: {line}\nReturn JSON (date, level, service, message), nothing else.",
        ),
        _log,
    ),
    Template(
        "json_people_list",
        "json",
        (
            "Write a JSON array of objects with name and {measure} for {rows}. Only the JSON.",
            "{rows}: as a JSON list with name and {measure} for each. Only the JSON.",
            "Each person has a {measure}: {rows}. Return a JSON array of objects, nothing else.",
            "Make a JSON array (keys name, {measure}) from: {rows}. JSON only.",
        ),
        _people_list,
    ),
    Template(
        "json_nested",
        "json",
        (
            "Write a JSON object for a {outer} with {first} and a nested object {inner} with {second}. Only the JSON.",
            "JSON only: a {outer} ({first}) that contains a {inner} ({second}).",
            "A {outer} has {first}. Its {inner} has {second}. Write it as nested JSON, nothing else.",
        ),
        _nested,
    ),
    Template(
        "json_settings",
        "json",
        (
            "Write a JSON settings file for the {service} service: {values}. Only the JSON.",
            "Settings of {service}: {values}. Return them as one JSON object, nothing else.",
            "Create config.json for {service} with {values}. Only the JSON.",
        ),
        _settings,
    ),
    Template(
        "json_inventory",
        "json",
        (
            "In the {place} there are {stock}. Write the counts as a JSON object. Only the JSON.",
            "Stock of the {place}: {stock}. As JSON, item to count, nothing else.",
            "Return a JSON object that maps each item to its count. {place}: {stock}. JSON only.",
        ),
        _inventory,
    ),
    Template(
        "json_from_csv",
        "json",
        (
            "Convert these CSV rows to a JSON array. Only the JSON.\n{csv}",
            "{csv}\nRewrite the CSV above as JSON objects in an array, nothing else.",
        ),
        _csv_rows,
        held_out=True,
    ),
    Template(
        "json_schema",
        "json",
        (
            "Write a JSON Schema for a {entity} with {fields}. Only the JSON.",
            "JSON Schema (type object, properties, required) for a {entity}: {fields}. Only the schema.",
        ),
        _schema,
        held_out=True,
    ),
)
