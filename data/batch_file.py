"""The engine `batch`: a hand-off by files in the format of OpenAI's batch API.

    batch/requests-1.jsonl  written here: one request a line, `custom_id` names the sample
    batch/answers-1.jsonl   to be filled in, by OpenAI's service, `vllm run-batch` or anything else

The stage ends there with a message, and goes on from the answers when it is run again; where the token budget
is not reached, it asks for more. Errors and missing lines quarantine their samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from data.engines import Completion, Failure, FailureStreak, SampleRequest
from data.errors import UserError
from data.files import write_atomic
from data.json_lines import read_json_lines
from data.openai_api import AnswerReader, EndpointConfig, request_body

MAX_REQUESTS = 50_000
"""What OpenAI's service takes in one file; the rest goes into the next."""


class BatchFileEngine:
    """Samples the target by files; see `data.engines.SamplingEngine`. Completions carry no signals."""

    def __init__(self, directory: Path, config: EndpointConfig, reader: AnswerReader) -> None:
        """`directory` holds the files of earlier rounds. Raises UserError where one is not filled in, or not
        of the format.
        """
        self.directory = directory
        self.config = config
        self.reader = reader
        self.streak = FailureStreak()
        self.answers: dict[str, Any] = {}
        """By custom_id, for everything that was asked: the line of the answer, None where there is none."""
        self.rounds = 0
        while (asked := directory / f"requests-{self.rounds + 1}.jsonl").exists():
            self.rounds += 1
            self._read_round(asked, directory / f"answers-{self.rounds}.jsonl")

    def _read_round(self, asked: Path, answers: Path) -> None:
        if not answers.exists():
            raise UserError(_to_do(asked, answers))
        ids = [row["custom_id"] for _, row in read_json_lines(asked, "batch file")]
        given = {str(row.get("custom_id")): row for _, row in read_json_lines(answers, "batch file")}
        if not given.keys() & set(ids):
            raise UserError(f"{answers} answers none of the requests in {asked}: is it another batch's?")
        self.answers |= {custom_id: given.get(custom_id) for custom_id in ids}

    def hand_off(
        self,
        shards: Iterable[tuple[bool, int, Sequence[tuple[SampleRequest, float]]]],
        max_new_tokens: int,
        tokens: int,
    ) -> None:
        """Ask for what is missing to reach `tokens` completion tokens; UserError names the file to fill in.

        `shards` come in their order: whether the shard counts to the budget, its completion tokens where it
        is on disk, and else its requests with their temperatures. Answers to come count as long as the
        answers so far, and those that cannot be used as nothing.
        """
        counted = [self._length(line) for line in self.answers.values() if line]
        mean = sum(counted) / len(counted) if counted else max_new_tokens
        bodies, hoped, streak = [], 0.0, FailureStreak()
        for training, there, requests in shards:
            hoped += training * there
            for request, temperature in requests:
                if request.id in self.answers:
                    answer = self._result(request, max_new_tokens)
                    streak.hear(answer)  # or another round of a hopeless batch would be asked for
                    hoped += training * (len(answer.tokens) if isinstance(answer, Completion) else 0)
                else:
                    hoped += training * mean
                    body = request_body(self.config, request, temperature, max_new_tokens)
                    bodies.append((request.id, body))
            if hoped >= tokens or len(bodies) >= MAX_REQUESTS:
                break
        if not bodies:
            return
        url = f"/v1{self.config.path}"
        lines = [
            json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})
            for custom_id, body in bodies[:MAX_REQUESTS]
        ]
        asked = self.directory / f"requests-{self.rounds + 1}.jsonl"
        write_atomic(asked, "\n".join(lines) + "\n")
        raise UserError(_to_do(asked, self.directory / f"answers-{self.rounds + 1}.jsonl"))

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_new_tokens: int,
        on_tokens: Callable[[int], None],
    ) -> list[Completion | Failure]:
        """The answers that stand in the files, in the order of the requests."""
        results = []
        for request in requests:
            results.append(result := self._result(request, max_new_tokens))
            self.streak.hear(result)
            if isinstance(result, Completion):
                on_tokens(len(result.tokens))
        return results

    def _result(self, request: SampleRequest, max_new_tokens: int) -> Completion | Failure:
        line = self.answers.get(request.id)
        if line is None:
            return Failure("the batch holds no answer")
        response = line.get("response")
        if not isinstance(response, dict):
            response = {}
        if line.get("error") or response.get("status_code", 200) != 200:
            return Failure(f"the batch says {json.dumps(line.get('error') or response.get('body'))[:200]}")
        return self.reader.read(response.get("body"), request, max_new_tokens, asked=self.config)

    def _length(self, line: Any) -> int:
        try:
            return int(line["response"]["body"]["usage"]["completion_tokens"])
        except (KeyError, TypeError, ValueError):  # no answer, or one that says nothing of the kind
            return 0


def _to_do(asked: Path, answers: Path) -> str:
    return (
        f"the target's answers come from outside: run the requests in {asked} (OpenAI batch format), put "
        f"what they gave into {answers}, and run the same command again"
    )
