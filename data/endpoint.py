"""The engine `openai`: any server with an OpenAI-compatible API, asked by a few threads at a time.

A server may be busy, die, be restarted or answer nonsense. What may pass is asked again, later and later
(with jitter, so that the threads do not come back together); what will not pass fails that one sample, and
many failures in a row end the work with what is finished kept.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from data.engines import Completion, Failure, FailureStreak, SampleRequest
from data.errors import UserError
from data.openai_api import AnswerReader, EndpointConfig, request_body

ATTEMPTS = 8
"""At the waits below a server may be away for half a minute, mostly for longer."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds
REACH_SECONDS = 10.0
MOST_BYTES = 64 << 20  # of an answer: a million tokens with their probabilities
KEY_VARIABLE = "OPENAI_API_KEY"

_PASSING = {408, 409, 425, 429}  # and everything from 500 on
_WRONG_ADDRESS = {401, 403, 404, 405}


class _Passing(Exception):
    """A fault that may be over at the next attempt; `wait` is the server's own wish, in seconds."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class _Rejected(Exception):
    """The server will not answer this request, however often it is asked."""


class EndpointEngine:
    """Samples the target over HTTP; see `data.engines.SamplingEngine`. Completions carry no signals."""

    def __init__(self, config: EndpointConfig, reader: AnswerReader) -> None:
        """Raises UserError where no server answers at `config.url`."""
        assert config.url is not None
        self.config = config
        self.reader = reader
        self.url = config.url
        self.streak = FailureStreak()
        check_reachable(config.url)

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_new_tokens: int,
        on_tokens: Callable[[int], None],
    ) -> list[Completion | Failure]:
        """Completions in the order of the requests; UserError where the server does not serve at all."""
        waiting = iter(enumerate(requests))
        lock, stop = threading.Lock(), threading.Event()
        finished: queue.SimpleQueue[tuple[int, Completion | Failure | Exception]] = queue.SimpleQueue()

        def work() -> None:
            while not stop.is_set():
                with lock:
                    index, request = next(waiting, (-1, None))
                if request is None:
                    return
                result: Completion | Failure | Exception
                try:
                    body = request_body(self.config, request, temperature, max_new_tokens)
                    result = self.ask(body, request, max_new_tokens, stop)
                except Exception as error:  # the main thread raises it
                    result = error
                finished.put((index, result))

        for _ in range(min(self.config.concurrency, len(requests))):
            # Daemons: a request in flight may hang for minutes, and an interrupt shall not wait for it.
            threading.Thread(target=work, daemon=True).start()
        results: dict[int, Completion | Failure] = {}
        try:
            while len(results) < len(requests):
                index, result = finished.get()
                if isinstance(result, Exception):
                    raise result
                self.streak.hear(result)
                results[index] = result
                if isinstance(result, Completion):
                    on_tokens(len(result.tokens))
        finally:
            stop.set()
        return [results[index] for index in range(len(requests))]

    def ask(
        self, body: dict[str, Any], request: SampleRequest, max_new_tokens: int, stop: threading.Event
    ) -> Completion | Failure:
        """Ask for one sample until there is an answer, or no hope of one."""
        reason = ""
        wait = 0.0
        for attempt in range(ATTEMPTS):
            if stop.wait(wait):
                break
            try:
                answer = self.post(body)
            except _Rejected as error:
                return Failure(str(error))
            except _Passing as error:
                reason = str(error)
                backoff = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1.0)
                wait = max(backoff, min(error.wait, LONGEST_WAIT))
            else:
                result = self.reader.read(answer, request, max_new_tokens, asked=self.config)
                return Failure(_without_key(result.reason)) if isinstance(result, Failure) else result
        return Failure(f"{reason} ({ATTEMPTS} attempts)")

    def post(self, body: dict[str, Any]) -> Any:
        """One request; the JSON of its response."""
        request = urllib.request.Request(
            self.url + self.config.path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        _authorize(request)
        try:
            with urllib.request.urlopen(request, timeout=self.config.timeout_seconds) as reply:
                raw = reply.read(MOST_BYTES + 1)
                if len(raw) > MOST_BYTES:
                    raise _Rejected(f"the answer is longer than {MOST_BYTES >> 20} MiB")
                return json.loads(raw)
        except urllib.error.HTTPError as error:
            self._raise_for(error)
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(f"no answer from {self.url}: {_reason(error)}") from error
        except (ValueError, RecursionError) as error:
            raise _Passing("the answer is not JSON") from error

    def _raise_for(self, error: urllib.error.HTTPError) -> NoReturn:
        with error:
            said = f"HTTP {error.code}: {_excerpt(error)}"
        if error.code in _PASSING or error.code >= 500:
            wait = error.headers.get("Retry-After", "")
            raise _Passing(said, float(wait) if wait.isdecimal() else 0.0) from error
        if error.code in _WRONG_ADDRESS:
            raise UserError(
                f"{self.url}{self.config.path} refuses us with {said}; check sample.endpoint (url, model, "
                f"api) and, where it wants a key, the variable {KEY_VARIABLE}."
            ) from error
        raise _Rejected(said) from error


def check_reachable(url: str) -> None:
    """Raise `UserError` where no server answers at `url`; any answer will do, as access is its own matter."""
    request = urllib.request.Request(f"{url}/models")
    _authorize(request)
    try:
        urllib.request.urlopen(request, timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UserError(
            f"no server answers at {url} ({_reason(error)}): start it, or mend sample.endpoint.url"
        ) from error


def _authorize(request: urllib.request.Request) -> None:
    key = os.environ.get(KEY_VARIABLE)
    if key:
        request.add_unredirected_header("Authorization", f"Bearer {key}")  # another host must not get it


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error) or type(error).__name__


def _excerpt(error: urllib.error.HTTPError) -> str:
    """The beginning of an error's body."""
    try:
        text = error.read(2000).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return error.reason
    return " ".join(_without_key(text).split())[:200] or error.reason


def _without_key(text: str) -> str:
    """What a server says, without the key, should it repeat that."""
    key = os.environ.get(KEY_VARIABLE)
    return text.replace(key, "***") if key else text
