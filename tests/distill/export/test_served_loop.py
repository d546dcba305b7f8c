"""The whole loop as a user runs it: make distill, make export, then the printed commands as they are."""

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    "--set sample.tokens=2500 --set sample.max_new_tokens=32 --set train.tokens=2000 "
    "--set evaluate.prompts=3 --set evaluate.num_speculative_tokens=[4] --set evaluate.max_new_tokens=24"
)


@pytest.mark.slow
def test_make_distill_make_export_serve_ask(llama_cpp: None, tmp_path: Path) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8080)) == 0:
            pytest.skip("something listens on port 8080 already")
    environment = {**os.environ, "DISTILL_RUNS": str(tmp_path / "runs"), "PYTHONPATH": str(ROOT)}
    for name in ("MAKEFLAGS", "MAKELEVEL"):
        environment.pop(name, None)

    def make(target: str, arguments: str) -> str:
        # The environment stands; `make` is not to judge its age by a checkout's times.
        words = ["make", "-o", ".venv/.installed", target, "RECIPE=smollm2-135m", f"ARGS={arguments}"]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    make("distill", SMALL)
    out = tmp_path / "served"
    start, ask = make("export", f"{SMALL} --format gguf --out {out}").strip().splitlines()[-2:]
    assert start.endswith("/serve/llama-cpp.sh &") and ask.endswith("/serve/ask.py")
    # Both lines in one shell, as they would be typed; the server ends with the shell's group.
    shell = subprocess.Popen(
        ["sh", "-c", f"{start}\n{ask}"],
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert shell.stdout is not None
        said = next((line for line in shell.stdout if line.startswith("accepted")), "nothing was accepted")
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(20)
    assert re.search(r"accepted \d+ of [1-9]\d* drafted tokens .* tokens/s", said)
