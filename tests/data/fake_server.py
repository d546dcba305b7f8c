"""A small OpenAI-compatible server on loopback that misbehaves on request."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from data.engines import SampleRequest

EOS = 2


def good_answer(body: dict[str, Any], **choice: Any) -> dict[str, Any]:
    """An answer in vLLM's form: three tokens that depend on the seed, and the end-of-sequence token."""
    tokens = [3 + body["seed"] % 40, 5, 6, EOS][: body["max_tokens"]]
    stopped = tokens[-1] == EOS
    return {
        "choices": [
            {
                "text": " ".join(f"w{token}" for token in tokens if token != EOS),
                "finish_reason": "stop" if stopped else "length",
                "token_ids": tokens,
                "prompt_token_ids": body["prompt"],
                **choice,
            }
        ],
        "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)},
    }


Reply = tuple[int, bytes | dict[str, Any]]
Behaviour = Callable[[dict[str, Any], int], Reply | None]
"""(request body, how often it came) to status and body; None hangs until the server is closed."""


@dataclass
class Fake:
    """A running fake."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0


@contextlib.contextmanager
def fake_server(behave: Behaviour, port: int = 0) -> Iterator[Fake]:
    """Serve on loopback until the block ends."""
    lock, closed = threading.Lock(), threading.Event()
    seen: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            """Nothing: the tests read what was asked."""

        def do_GET(self) -> None:
            self.reply((200, {"data": [{"id": "target"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                fake.asked.append(body)
                fake.headers.append(dict(self.headers))
                fake.at_once += 1
                fake.most_at_once = max(fake.most_at_once, fake.at_once)
                name = json.dumps(body, sort_keys=True)
                seen[name] = seen.get(name, 0) + 1
                times = seen[name]
            time.sleep(0.01)  # so that requests really overlap
            answer = behave(body, times)
            with lock:
                fake.at_once -= 1
            if answer is None:
                closed.wait()
                return
            self.reply(answer)

        def reply(self, answer: Reply) -> None:
            status, content = answer
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            with contextlib.suppress(OSError):  # the client may have left
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", port), Handler) as server:
        fake = Fake(f"http://127.0.0.1:{server.server_address[1]}/v1")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            closed.set()
            server.shutdown()


def requests(count: int) -> list[SampleRequest]:
    """Different prompts with different seeds."""
    return [SampleRequest([7, index + 3], seed=2**40 + index, id=f"p{index}") for index in range(count)]
