"""The shipped prompt templates, by task. All wording and all word lists were written for this project."""

from data.prompt_sets import (
    chat,
    classes,
    code,
    config_files,
    functions,
    json_objects,
    math_problems,
    sql,
    summaries,
    tables,
    translations,
)
from data.prompt_sets.template import Template, fills

TEMPLATES: tuple[Template, ...] = (
    *json_objects.TEMPLATES,
    *sql.TEMPLATES,
    *classes.TEMPLATES,
    *functions.TEMPLATES,
    *config_files.TEMPLATES,
    *tables.TEMPLATES,
    *chat.TEMPLATES,
    *code.TEMPLATES,
    *math_problems.TEMPLATES,
    *summaries.TEMPLATES,
    *translations.TEMPLATES,
)
GROUPS: dict[str, tuple[str, ...]] = {
    "structured": ("json", "sql", "class", "function", "config", "table"),
    "open": ("chat", "code", "math", "summarise", "translate"),
}

__all__ = ["GROUPS", "TEMPLATES", "Template", "fills"]
