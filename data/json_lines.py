"""JSON lines from outside: one object a line, and every fault of a line with its place."""

import json
from pathlib import Path
from typing import Any

from data.errors import UserError


def read_json_lines(path: Path, what: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with the `path:line` to name in messages.

    Blank lines do not count; `what` names the kind of file in messages. Raises `UserError` where the file
    cannot be read or a line is no JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{what} {path} cannot be read ({error}): give the path of a UTF-8 JSONL file"
        ) from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}:{number}"
            rows.append((where, _object(line, where)))
    return rows


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg}): every line must be one JSON object") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deep to be read: take this line out") from error
    except ValueError as error:  # int() of thousands of digits
        raise UserError(f"{where}: a number in it cannot be read ({error}): take this line out") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a line must be a JSON object, not {type(row).__name__}")
    return row
