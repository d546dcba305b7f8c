"""--json: one JSON object on stdout, and nothing else there."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def json_output(as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Give a function that prints the one JSON object; until then whatever else is printed, libraries and
    child processes included, goes to stderr. Without --json the function prints nothing.
    """
    if not as_json:
        yield lambda answer: None
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answers: list[dict[str, Any]] = []
            yield answers.append
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    sys.stdout.write("".join(json.dumps(_plain(answer), allow_nan=False) + "\n" for answer in answers[:1]))
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
