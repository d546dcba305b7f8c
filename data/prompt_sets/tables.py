"""Prompts whose answer is a table or markup."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template


def _rows(dice: Dice) -> Fill:
    name = dice.one(tuple(words.ENTITIES))
    fields = dice.some(words.ENTITIES[name], dice.between(2, 3))
    rows = [", ".join(f.value(dice) for f in fields) for _ in range(dice.between(2, 3))]
    return {
        "entity": words.plural(name),
        "columns": ", ".join(f.name for f in fields),
        "rows": dice.one(("; ", " / ", "\n")).join(rows),
    }


def _items(dice: Dice) -> Fill:
    pool = dice.one((words.FRUITS, words.CITIES, words.PRODUCTS, words.SPORTS, words.DISHES, words.JOBS, words.SUBJECTS))
    return {"items": words.listed(dice.some(pool, dice.between(3, 6))), "tag": dice.one(("ul", "ol"))}


def _form(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 2, 3)
    return {"entity": name.lower(), "fields": words.listed([f.name for f in fields])}


def _links(dice: Dice) -> Fill:
    pages = dice.some([*words.SERVICES, *(name.lower() for name in words.ENTITIES)], dice.between(3, 4))
    return {"pages": words.listed(pages)}


def _record(dice: Dice) -> Fill:
    name, fields = words.entity(dice, 3, 4)
    return {"entity": name.lower(), "pairs": ", ".join(f"{f.name} {f.value(dice)}" for f in fields)}


def _style(dice: Dice) -> Fill:
    rules = (
        f"color {dice.one(words.COLORS)}",
        f"background {dice.one(words.COLORS)}",
        f"padding {dice.between(2, 40)}px",
        f"margin {dice.between(2, 40)}px",
        f"font size {dice.between(9, 40)}px",
        f"width {dice.between(40, 900)}px",
        f"border radius {dice.between(2, 30)}px",
    )
    return {
        "name": dice.one((*words.SERVICES, "card", "menu", "button", "header", "footer", "banner")),
        "rules": words.listed(dice.some(rules, dice.between(3, 5))),
    }


TEMPLATES = (
    Template(
        "csv_table",
        "table",
        (
            "Write a CSV of {entity} with the header {columns} and these rows: {rows}. Only the CSV.",
            "Only CSV, columns {columns}: {rows}.",
            "{entity} as CSV (header {columns}): {rows}. Nothing else.",
        ),
        _rows,
    ),
    Template(
        "markdown_table",
        "table",
        (
            "Write a Markdown table with the columns {columns} and these rows: {rows}. Only the table.",
            "Markdown table of {entity}, columns {columns}: {rows}. Only the table.",
            "Only a Markdown table ({columns}): {rows}.",
        ),
        _rows,
    ),
    Template(
        "html_list",
        "table",
        (
            "Write an HTML {tag} list of {items}. Only the HTML.",
            "Only HTML: a <{tag}> with {items}.",
            "HTML code for a {tag} list with the items {items}, nothing else.",
        ),
        _items,
    ),
    Template(
        "html_form",
        "table",
        (
            "Write an HTML form for a {entity} with inputs for {fields}. Only the HTML.",
            "Only HTML: a form ({entity}) with {fields} and a submit button.",
            "HTML form with the fields {fields} for a new {entity}. No explanation.",
        ),
        _form,
    ),
    Template(
        "html_navigation",
        "table",
        (
            "Write an HTML nav with links to {pages}. Only the HTML.",
            "Only HTML: a navigation bar that links to {pages}.",
            "HTML <nav> for the pages {pages}, nothing else.",
        ),
        _links,
    ),
    Template(
        "css_rule",
        "table",
        (
            "Write a CSS rule for .{name} with {rules}. Only the CSS.",
            "Only CSS: class {name}, {rules}.",
            "CSS for .{name}: {rules}. No explanation.",
        ),
        _style,
    ),
    Template(
        "html_table",
        "table",
        (
            "Write an HTML table with the columns {columns} and these rows: {rows}. Only the HTML.",
            "Only HTML: a table of {entity} ({columns}): {rows}.",
        ),
        _rows,
        held_out=True,
    ),
    Template(
        "xml_record",
        "table",
        (
            "Write this {entity} as XML: {pairs}. Only the XML.",
            "Only XML: a {entity} element with {pairs}.",
        ),
        _record,
        held_out=True,
    ),
)
