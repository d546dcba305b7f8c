"""Prompts whose answer is a list, a table or a style, in HTML, Markdown or CSS."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template


def _rows(dice: Dice) -> Fill:
    name = dice.one(tuple(words.ENTITIES))
    fields = dice.some(words.ENTITIES[name], 2)
    rows = [", ".join(f.value(dice) for f in fields) for _ in range(dice.between(2, 3))]
    return {
        "entity": words.plural(name),
        "columns": " and ".join(f.name for f in fields),
        "rows": "; ".join(rows),
    }


def _items(dice: Dice) -> Fill:
    pools = (
        words.FRUITS,
        words.CITIES,
        words.PRODUCTS,
        words.SPORTS,
        words.DISHES,
        words.JOBS,
        words.SUBJECTS,
    )
    return {"items": words.listed(dice.some(dice.one(pools), dice.between(3, 6)))}


def _tagged_items(dice: Dice) -> Fill:
    return {**_items(dice), "tag": dice.one(("ul", "ol", "unordered list", "ordered list"))}


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
        "rules": words.listed(dice.some(rules, dice.between(2, 4))),
    }


TEMPLATES = (
    Template(
        "html_list",
        "table",
        (
            "Create an HTML {tag} with the items {items}. Code only.",
            "Create an HTML {tag} of {items}. Code only.",
            "Create an HTML {tag} with {items}. Code only.",
        ),
        _tagged_items,
    ),
    Template(
        "markdown_list",
        "table",
        (
            "Write a Markdown list of {items}.",
            "Convert to a Markdown list: {items}.",
        ),
        _items,
    ),
    Template(
        "markdown_table",
        "table",
        (
            "Convert the {entity} to a Markdown table ({columns}): {rows}",
            "Write a Markdown table of {entity} with {columns}: {rows}. Only the table.",
        ),
        _rows,
    ),
    Template(
        "css_rule",
        "table",
        (
            "Create a CSS rule for .{name} with {rules}. Only the CSS.",
            "Create a CSS rule for .{name}: {rules}.",
            "Create a CSS class {name} with {rules}.",
        ),
        _style,
    ),
    Template(
        "html_table",
        "table",
        (
            "Convert these {entity} to an HTML table with the header {columns}: {rows}",
            "Create an HTML table of {entity} with {columns}: {rows}. Code only.",
        ),
        _rows,
        held_out=True,
    ),
)
