"""The shipped prompt templates, by task. All wording and all word lists were written for this project."""

from data.prompt_sets import (
    chat,
    classes,
    code,
    config_files,
    essays,
    functions,
    json_objects,
    math_problems,
    passages,
    puzzles,
    questions,
    sql,
    summaries,
    tables,
    to_english,
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
    *questions.TEMPLATES,
    *essays.TEMPLATES,
    *passages.TEMPLATES,
    *puzzles.TEMPLATES,
    *to_english.TEMPLATES,
)
_STRUCTURED = ("json", "sql", "class", "function", "config", "table")
_OPEN = ("chat", "code", "math", "summarise", "translate")
_WIDE = ("qa", "essay", "writing", "passage", "puzzle", "to_english")
_RECORDS = (
    *("json_event", "json_movie", "json_order", "json_pairs", "json_person", "json_product", "json_server"),
    *("sql_count", "sql_create", "sql_delete", "sql_insert", "sql_top"),
    *("c_struct", "csharp_class", "java_class", "python_class", "python_subclass", "typescript_interface"),
    *("json_from_csv", "json_schema", "sql_alter", "sql_join", "javascript_class", "kotlin_class"),
)
_OTHER_STRUCTURED = tuple(t.name for t in TEMPLATES if t.task in _STRUCTURED and t.name not in _RECORDS)

# Names that recipes may ask for, beside the tasks' own: the tasks or templates that each stands for.
GROUPS: dict[str, tuple[str, ...]] = {
    "records": _RECORDS,
    "structured": _STRUCTURED,
    "open": _OPEN,
    "wide": _WIDE,
    # Everything but the workload of `records`: what a general drafter learns, before it is aligned to that.
    "general": (*_OPEN, *_WIDE, *_OTHER_STRUCTURED),
}

__all__ = ["GROUPS", "TEMPLATES", "Template", "fills"]
