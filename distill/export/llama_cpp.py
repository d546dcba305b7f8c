"""llama.cpp itself, out of the wheel xllamacpp, asked over HTTP: is speculation on, right, and faster?

The servers run in processes of their own, started by the script that an export carries, so that what is
proven is what a user starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import UserError
from evaluation.acceptance import bootstrap_ratio
from evaluation.lossless import NOISE_MARGIN

SERVER = Path(__file__).with_name("llama_cpp_server.py")
STOP_SECONDS = 20.0
TOP = 10  # most likely ids whose log-probabilities are compared at a divergence


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[str]

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Run only in here: an idle server's threads spin for a while and slow down the one that is timed."""
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)


@dataclass(frozen=True)
class Completion:
    """What one request gave."""

    tokens: list[int]
    seconds: float
    """Of decoding after the prompt, by llama.cpp's own clock."""
    prompt_seconds: float
    """Of reading one token of the prompt, many at a time."""
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Race:
    """Plain against speculative decoding of one pair of GGUF files, prompt by prompt."""

    prompts: int
    identical: int
    near_ties: int
    """Texts that part where two ids are as likely, up to the measured rounding of llama.cpp."""
    tokens: int
    drafted: int
    accepted: int
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: dict[str, float]
    """mean, low and high: plain over speculative seconds for the same tokens, bootstrapped over prompts."""
    round_cost: float
    """Seconds of a round over those of a plain step."""
    wide_cost: float
    """Seconds of one token in a wide forward (the prompt's) over those of a plain step: the least that
    checking one more draft costs.
    """

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_target_call(self) -> float:
        return self.tokens / (self.tokens - self.accepted)

    @property
    def lossless(self) -> bool:
        return self.identical + self.near_ties == self.prompts


def require_server() -> None:
    """`UserError` where xllamacpp is not installed."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise UserError(
            "llama.cpp is needed to prove a GGUF export: install it with "
            "`pip install -c constraints.txt -e '.[serve]'`."
        )


@contextlib.contextmanager
def serving(target: Path, draft: Path | None = None, num_speculative_tokens: int = 0) -> Iterator[Server]:
    """Serve a target, plainly or with a drafter, and give the address; `UserError` where it does not
    start.
    """
    command = [sys.executable, str(SERVER), "-m", str(target), "--port", "0"]
    if draft is not None:
        command += ["-md", str(draft), "--spec-type", "draft-simple"]
        command += ["--spec-draft-n-max", str(num_speculative_tokens)]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("listening on "):
                process.wait(STOP_SECONDS)
                log.seek(0)
                said = log.read().strip().splitlines() or ["no message"]
                raise UserError(f"llama.cpp does not serve {target.name}: {said[-1]}")
            yield Server(line.removeprefix("listening on ").strip(), process)
        finally:
            process.send_signal(signal.SIGCONT)  # a stopped process would not hear the next signal
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def complete(url: str, prompt: Sequence[int], max_new_tokens: int) -> Completion:
    """Continue token ids greedily."""
    answer = _post(url, prompt, max_new_tokens)
    timings = answer["timings"]
    return Completion(
        tokens=answer["tokens"],
        seconds=timings["predicted_ms"] / 1e3,
        prompt_seconds=timings["prompt_ms"] / 1e3 / max(1, timings["prompt_n"]),
        drafted=timings.get("draft_n", 0),
        accepted=timings.get("draft_n_accepted", 0),
    )


def race(
    target: Path,
    draft: Path,
    num_speculative_tokens: int,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    seed: int,
) -> Race:
    """Both servers on the same prompts, in turns; who goes first changes from prompt to prompt."""
    with serving(target) as plain_server, serving(target, draft, num_speculative_tokens) as server:
        for each in (plain_server, server):  # the first request is slower, whoever answers it
            with each.awake():
                complete(each.url, prompts[0], min(8, max_new_tokens))
        pairs = []
        for number, prompt in enumerate(prompts):
            found = {}
            for each in (plain_server, server) if number % 2 == 0 else (server, plain_server):
                with each.awake():
                    found[each.url] = complete(each.url, prompt, max_new_tokens)
            pairs.append((found[plain_server.url], found[server.url]))
        identical = sum(plain.tokens == ours.tokens for plain, ours in pairs)
        with plain_server.awake():
            near_ties = sum(
                plain.tokens != ours.tokens
                and is_near_tie(plain_server.url, prompt, plain.tokens, ours.tokens)
                for prompt, (plain, ours) in zip(prompts, pairs, strict=True)
            )
    plain_seconds, seconds = (np.array([pair[side].seconds for pair in pairs]) for side in (0, 1))
    plain_tokens, tokens = (np.array([len(pair[side].tokens) for pair in pairs], float) for side in (0, 1))
    accepted = sum(ours.accepted for _, ours in pairs)
    step = plain_seconds.sum() / plain_tokens.sum()
    return Race(
        prompts=len(prompts),
        identical=identical,
        near_ties=near_ties,
        tokens=int(tokens.sum()),
        drafted=sum(ours.drafted for _, ours in pairs),
        accepted=accepted,
        plain_tokens_per_second=float(1 / step),
        tokens_per_second=float(tokens.sum() / seconds.sum()),
        speedup=bootstrap_ratio(plain_seconds / plain_tokens * tokens, seconds, seed=seed),
        wide_cost=float(np.median([plain.prompt_seconds for plain, _ in pairs]) / step),
        round_cost=float(seconds.sum() / (tokens.sum() - accepted) / step),
    )


def is_near_tie(url: str, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int]) -> bool:
    """Do two greedy texts part only where rounding decides?

    A verify forward is wider than a plain step, and rounds otherwise. That noise is measured at the
    divergence, as the largest difference in log-probability between a wide forward (the text read as a
    prompt) and a step of width 1; two ids within a few times of it are a tie. Texts of which one is the
    other's beginning are none.
    """
    shared = next((i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), None)
    if shared is None:
        return False
    text = [*prompt, *plain[:shared]]
    wide = _top(url, text, 1)
    single = _top(url, text[:-1], 2) if shared else wide
    common = wide.keys() & single.keys()
    pair = (plain[shared], speculative[shared])
    if not common.issuperset(pair):
        return False
    noise = max(abs(wide[number] - single[number]) for number in common)
    return abs(single[pair[0]] - single[pair[1]]) <= NOISE_MARGIN * noise


def _top(url: str, prompt: Sequence[int], count: int) -> dict[int, float]:
    """Log-probabilities of the most likely ids at the last of `count` tokens that follow `prompt`."""
    answer = _post(url, prompt, count, n_probs=TOP)
    last = answer["completion_probabilities"][-1]["top_logprobs"]
    return {int(entry["id"]): float(entry["logprob"]) for entry in last}


def _post(url: str, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> dict[str, Any]:
    body = {
        "prompt": list(prompt),
        "n_predict": max_new_tokens,
        "temperature": 0,
        "cache_prompt": False,  # a cached prompt would make the second of two equal requests faster
        "return_tokens": True,
        **options,
    }
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        return dict(json.load(reply))
