"""`hub:` through the real client of the hub, against a server on loopback that speaks as much of its API as
reading one data set at one commit takes.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TALK = [{"role": "user", "content": "Why is the sky blue?"}, {"role": "assistant", "content": "It scatters."}]
ROWS = [{"messages": TALK}, {"messages": [{"role": "user", "content": "Name three rivers of France."}]}]
DATA = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
ENTRY = {"type": "file", "path": "train.jsonl", "size": len(DATA), "oid": "a" * 40}


class Hub(BaseHTTPRequestHandler):
    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.answer(posted=asked)

    def answer(self, with_body: bool = True, posted: str = "") -> None:
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        api, resolve = "/api/datasets/org/set", f"/datasets/org/set/resolve/{COMMIT}"
        if path in (api, f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": "train.jsonl"}]
            self.send(json.dumps({"id": "org/set", "sha": COMMIT, "siblings": siblings}))
        elif path.startswith(f"{api}/tree/{COMMIT}"):
            self.send(json.dumps([ENTRY]))
        elif path.startswith(f"{api}/paths-info/{COMMIT}"):
            self.send(json.dumps([ENTRY] if "train.jsonl" in posted else []))
        elif path == f"{resolve}/train.jsonl":
            self.send(DATA if with_body else b"", length=len(DATA))
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def send(self, body: str | bytes, length: int | None = None) -> None:
        raw = body.encode() if isinstance(body, str) else body
        self.send_response(200)
        headers = {
            "Content-Type": "application/json" if isinstance(body, str) else "application/octet-stream",
            "Content-Length": str(len(raw) if length is None else length),
            "X-Repo-Commit": COMMIT,
            "ETag": '"1234"',
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *words: Any) -> None:
        pass


@contextmanager
def hub() -> Iterator[tuple[str, list[str]]]:
    """The address of the server, and the paths that it is asked for."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Asked", (Hub,), {"asked": asked}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_a_data_set_is_read_by_id_and_commit_from_a_stand_in_of_the_hub(tmp_path: Path) -> None:
    def read(source: str) -> subprocess.CompletedProcess[str]:
        program = (
            "import json\n"
            "from data.errors import UserError\n"
            "from data.prompt_sources import read_source\n"
            "try:\n"
            f"    print(json.dumps([prompt.messages for prompt in read_source({source!r})]))\n"
            "except UserError as error:\n"
            "    print(json.dumps(str(error)))\n"
        )
        environment = {
            **os.environ,
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
            "PYTHONPATH": str(ROOT),
        }
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300
        )

    with hub() as (address, asked):
        done = read(f"hub:org/set@{COMMIT}")
        assert done.returncode == 0, f"{done.stderr[-3000:]} {asked}"
        # The second turn of a data set is another model's, so the first question alone is asked.
        questions = ["Why is the sky blue?", "Name three rivers of France."]
        assert json.loads(done.stdout) == [[["user", question]] for question in questions], asked
        assert any(COMMIT in path for path in asked)
        other = read(f"hub:org/set@{COMMIT[::-1]}")
        # The client falls back to what it has cached of the other commit, without an error of its own.
        assert "what is cached here is another one" in json.loads(other.stdout)
