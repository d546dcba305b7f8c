"""Prompts whose answer is an SQL statement."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template

_PLAIN = {"str": "text", "int": "integer", "float": "decimal", "bool": "boolean", "date": "date"}
_COMPARISONS = ("greater than", "less than", "at least", "equal to")


def _columns(fields: list[words.Field], dice: Dice) -> str:
    style = dice.one(("{name} ({kind})", "{name} {kind}", "{name}: {kind}"))
    return ", ".join(style.format(name=f.name, kind=_PLAIN[f.type]) for f in fields)


def _create(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 3, 5)
    return {"table": words.plural(name), "columns": _columns(fields, dice)}


def _create_with_key(dice: Dice) -> Fill:
    name, other = dice.some(list(words.ENTITIES), 2)
    fields = dice.some(words.ENTITIES[name], dice.between(2, 3))
    return {"table": words.plural(name), "columns": _columns(fields, dice), "other": words.plural(other)}


def _insert(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 3, 4)
    return {"table": words.plural(name), "values": ", ".join(f"{f.name} {f.value(dice)}" for f in fields)}


def _insert_rows(dice: Dice) -> Fill:
    name = dice.one(tuple(words.ENTITIES))
    fields = dice.some(words.ENTITIES[name], 2)
    rows = [" / ".join(f.value(dice) for f in fields) for _ in range(dice.between(2, 4))]
    return {"table": words.plural(name), "columns": ", ".join(f.name for f in fields), "rows": "; ".join(rows)}


def _number_field(name: str, dice: Dice) -> words.Field:
    return dice.one([f for f in words.ENTITIES[name] if f.type in ("int", "float")])


def _text_field(name: str, dice: Dice) -> words.Field:
    return dice.one([f for f in words.ENTITIES[name] if f.type == "str"])


def _select(dice: Dice) -> Fill:
    name = dice.one(tuple(words.ENTITIES))
    shown = dice.some(words.ENTITIES[name], dice.between(2, 3))
    number = _number_field(name, dice)
    condition = f"{number.name} is {dice.one(_COMPARISONS)} {number.value(dice)}"
    return {
        "table": words.plural(name),
        "columns": words.listed([f.name for f in shown]),
        "condition": condition,
        "order": dice.one(words.ENTITIES[name]).name,
        "direction": dice.one(("ascending", "descending")),
    }


def _group(dice: Dice) -> Fill:
    name = dice.one(tuple(words.ENTITIES))
    return {
        "table": words.plural(name),
        "measure": dice.one(("average", "total", "maximum", "minimum")),
        "number": _number_field(name, dice).name,
        "group": _text_field(name, dice).name,
        "limit": str(dice.between(2, 40)),
    }


def _join(dice: Dice) -> Fill:
    left, right = dice.some(list(words.ENTITIES), 2)
    return {
        "left": words.plural(left),
        "right": words.plural(right),
        "key": f"{right.lower()}_id",
        "first": dice.one(words.ENTITIES[left]).name,
        "second": dice.one(words.ENTITIES[right]).name,
    }


def _update(dice: Dice) -> Fill:
    name = dice.one(tuple(words.ENTITIES))
    changes = dice.some(words.ENTITIES[name], 2)
    return {
        "table": words.plural(name),
        "changes": words.listed([f"{f.name} to {f.value(dice)}" for f in changes]),
        "id": str(dice.between(10, 999)),
    }


TEMPLATES = (
    Template(
        "sql_create",
        "sql",
        (
            "Write a CREATE TABLE statement for {table} with an id and {columns}. SQL only.",
            "SQL only: create the table {table} with the columns {columns} and a primary key id.",
            "I need an SQL table {table}: {columns}. Add an id as primary key. Only the SQL.",
            "CREATE TABLE {table}, columns {columns}. Just the statement.",
        ),
        _create,
    ),
    Template(
        "sql_create_foreign_key",
        "sql",
        (
            "Write CREATE TABLE {table} with id, {columns} and a foreign key to {other}. SQL only.",
            "SQL only: a table {table} ({columns}) that references {other} by a foreign key.",
            "Create an SQL table {table} with {columns}; every row belongs to one row of {other}. Only the SQL.",
        ),
        _create_with_key,
    ),
    Template(
        "sql_insert",
        "sql",
        (
            "Write an INSERT statement for the table {table}: {values}. SQL only.",
            "Insert into {table} a row with {values}. Only the SQL.",
            "SQL only: add this row to {table}: {values}.",
            "Give the INSERT INTO statement that stores {values} in {table}. Just SQL.",
        ),
        _insert,
    ),
    Template(
        "sql_insert_rows",
        "sql",
        (
            "Write one INSERT for {table} ({columns}) with these rows: {rows}. SQL only.",
            "Table {table}, columns {columns}. Insert the rows {rows}. Only the SQL.",
            "SQL only: put {rows} into {table} ({columns}).",
        ),
        _insert_rows,
    ),
    Template(
        "sql_select",
        "sql",
        (
            "Write an SQL query: {columns} from {table} where {condition}, ordered by {order} {direction}. SQL only.",
            "Select {columns} of all {table} whose {condition}. Sort by {order}, {direction}. Only the SQL.",
            "SQL only: list {columns} from {table} if {condition}; order by {order} {direction}.",
        ),
        _select,
    ),
    Template(
        "sql_group",
        "sql",
        (
            "Write an SQL query for the {measure} {number} of {table} per {group}, top {limit} groups. SQL only.",
            "SQL only: group {table} by {group}, show the {measure} {number}, limit {limit}.",
            "From the table {table} compute the {measure} {number} for each {group}; at most {limit} rows. Only the SQL.",
        ),
        _group,
    ),
    Template(
        "sql_update",
        "sql",
        (
            "Write an UPDATE for {table} that sets {changes} where id is {id}. SQL only.",
            "SQL only: in {table}, set {changes} for the row with id {id}.",
            "Change {changes} in the table {table} for id {id}. Only the SQL statement.",
        ),
        _update,
    ),
    Template(
        "sql_join",
        "sql",
        (
            "Write an SQL query that joins {left} and {right} on {key} and shows {left}.{first} and {right}.{second}. SQL only.",
            "SQL only: {left} join {right} by {key}, selecting {first} of {left} and {second} of {right}.",
        ),
        _join,
        held_out=True,
    ),
    Template(
        "sql_view",
        "sql",
        (
            "Write CREATE VIEW for a view of {table} with {columns} where {condition}. SQL only.",
            "SQL only: a view on {table} that shows {columns} if {condition}.",
        ),
        lambda dice: {key: value for key, value in _select(dice).items() if key not in ("order", "direction")},
        held_out=True,
    ),
)
