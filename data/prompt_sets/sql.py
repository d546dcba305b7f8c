"""Prompts whose answer is an SQL statement."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template


def _bare_columns(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 2, 4)
    return {"table": words.plural(name), "columns": words.listed([f.name for f in fields])}


def _insert(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 2, 4)
    return {"table": words.plural(name), "values": ", ".join(f"{f.name} {f.value(dice)}" for f in fields)}


def _select(dice: Dice) -> Fill:
    name = dice.one(tuple(words.ENTITIES))
    shown = dice.some(words.ENTITIES[name], dice.between(2, 3))
    return {"columns": words.listed([f.name for f in shown]), **_condition(dice, name)}


def _condition(dice: Dice, name: str) -> Fill:
    number = words.number_field(dice, name)
    comparison = dice.one(("greater than", "less than", "at least", "equal to"))
    return {"table": words.plural(name), "condition": f"{number.name} is {comparison} {number.value(dice)}"}


def _delete(dice: Dice) -> Fill:
    return _condition(dice, dice.one(tuple(words.ENTITIES)))


def _group(dice: Dice) -> Fill:
    name = dice.one(tuple(words.ENTITIES))
    return {
        "table": words.plural(name),
        "measure": dice.one(("average", "total", "maximum", "minimum")),
        "number": words.number_field(dice, name).name,
        "group": words.text_field(dice, name).name,
    }


def _top(dice: Dice) -> Fill:
    name = dice.one(tuple(words.ENTITIES))
    return {
        "table": words.plural(name),
        "limit": str(dice.between(2, 40)),
        "number": words.number_field(dice, name).name,
        "end": dice.one(("highest", "lowest")),
    }


def _update(dice: Dice) -> Fill:
    name = dice.one(tuple(words.ENTITIES))
    changes = dice.some(words.ENTITIES[name], 2)
    return {
        "table": words.plural(name),
        "changes": words.listed([f"{f.name} to {f.value(dice)}" for f in changes]),
        "id": str(dice.between(10, 999)),
    }


def _join(dice: Dice) -> Fill:
    left, right = dice.some(tuple(words.ENTITIES), 2)
    return {
        "left": words.plural(left),
        "right": words.plural(right),
        "key": f"{right.lower()}_id",
        "first": dice.one(words.ENTITIES[left]).name,
        "second": dice.one(words.ENTITIES[right]).name,
    }


TEMPLATES = (
    Template(
        "sql_create",
        "sql",
        (
            "CREATE TABLE statement for {table}: {columns}. Only the SQL.",
            "Define a SQL table {table} with the columns {columns}. Only the SQL.",
            "Write a SQL statement that creates the table {table} with {columns}. Only the SQL.",
        ),
        _bare_columns,
    ),
    Template(
        "sql_insert",
        "sql",
        (
            "Insert a row into the SQL table {table} with {values}.",
            "Write a SQL INSERT statement for the table {table} with {values}.",
            "Insert one row with {values} into the SQL table {table}.",
        ),
        _insert,
    ),
    Template(
        "sql_select",
        "sql",
        (
            "Write a SQL query that selects {columns} from {table} where {condition}.",
            "SQL query for {columns} in {table} if {condition}.",
            "SQL query: get {columns} from the table {table} if {condition}.",
            "Write a SQL query to find {columns} of the {table} where {condition}.",
        ),
        _select,
    ),
    Template(
        "sql_group",
        "sql",
        (
            "SQL query for the {measure} {number} per {group} in {table}.",
            "SQL query for the {measure} {number} of {table} by {group}. Only the SQL.",
            "Write a SQL query to find the {measure} {number} in the table {table} grouped by {group}.",
            "Write a SQL query that selects {group} and the {measure} {number} from {table}.",
        ),
        _group,
    ),
    Template(
        "sql_update",
        "sql",
        (
            "Write a SQL UPDATE statement for {table} that sets {changes} where id is {id}.",
            "SQL UPDATE statement for {table}: set {changes} where id is {id}.",
            "Write a SQL UPDATE statement that sets {changes} in the table {table} for id {id}.",
        ),
        _update,
    ),
    Template(
        "sql_delete",
        "sql",
        (
            "Write a SQL query to delete rows from {table} where {condition}.",
            "Write a SQL DELETE statement that removes all {table} where {condition}.",
            "Write a SQL statement that deletes the rows of {table} where {condition}. Only the SQL.",
        ),
        _delete,
    ),
    Template(
        "sql_count",
        "sql",
        (
            "Write a SQL query to count the {table} where {condition}.",
            "SQL query for the number of {table} where {condition}.",
            "Write a SQL query that counts all rows of {table} where {condition}.",
        ),
        _delete,
    ),
    Template(
        "sql_top",
        "sql",
        (
            "SQL query for the top {limit} {table} by {end} {number}. Only the SQL.",
            "SQL query for the {limit} {table} with the {end} {number}. Only the SQL.",
        ),
        _top,
    ),
    Template(
        "sql_join",
        "sql",
        (
            "SQL query that joins {left} and {right} on {key} and selects {first} and {second}. Only the "
            "SQL.",
            "SQL query for {left}.{first} and {right}.{second}, joined on {key}.",
        ),
        _join,
        held_out=True,
    ),
    Template(
        "sql_alter",
        "sql",
        (
            "Write a SQL statement that adds the columns {columns} to the table {table}.",
            "Write a SQL statement that adds {columns} to the table {table}. Only the SQL.",
        ),
        _bare_columns,
        held_out=True,
    ),
)
