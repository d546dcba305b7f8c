"""What the OpenAI API is asked and what it answers: the same for an endpoint and for a batch file.

A prompt goes out as token ids where the server takes them (`api: completions`), so that the chat template is
rendered here alone. Answers are believed only as far as they can be checked: the prompt as the server counted
or read it, the number of tokens, the range of ids. Ids come from vLLM (`token_ids`), SGLang
(`response_token_ids`) and llama.cpp (the ids of its log-probabilities); from others only text, which is
encoded again and marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from data.engines import Completion, Failure, SampleRequest

SEED_BITS = 31  # what every server takes as a seed


class EndpointConfig(BaseModel):
    """A server, or a batch service, that serves the recipe's target. The key comes from OPENAI_API_KEY."""

    model_config = ConfigDict(extra="forbid")

    model: str
    """The target's name there."""
    url: str | None = None
    """Where its API begins, such as http://127.0.0.1:8000/v1; a batch file needs none."""
    api: Literal["completions", "chat"] = "completions"
    """`completions` sends token ids. `chat` sends messages, and the server's chat template must be ours."""
    extensions: bool = True
    """Ask for token ids, and for sampling from the whole distribution, by parameters that vLLM, SGLang and
    llama.cpp know and OpenAI's own service refuses."""
    concurrency: int = Field(default=16, ge=1)
    timeout_seconds: float = Field(default=300, gt=0)

    @field_validator("url")
    @classmethod
    def _is_plain(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("write it as http://HOST:PORT/v1")
        if "@" in parts.netloc or parts.query:
            raise ValueError("recipes hold no secrets: the key comes from the variable OPENAI_API_KEY")
        return value.rstrip("/")

    @property
    def path(self) -> str:
        """The path of a request under `url`."""
        return "/chat/completions" if self.api == "chat" else "/completions"

    def identity(self) -> dict[str, Any]:
        """What decides the samples: not where the server stands, nor how it is asked."""
        return self.model_dump(include={"model", "api", "extensions"})


def request_body(
    config: EndpointConfig, request: SampleRequest, temperature: float, max_new_tokens: int
) -> dict[str, Any]:
    """The JSON object that asks for one sample from the target's own distribution."""
    body: dict[str, Any] = {
        "model": config.model,
        "max_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": 1.0,
        "seed": request.seed % 2**SEED_BITS,
    }
    if config.api == "chat":
        body["messages"] = [{"role": role, "content": content} for role, content in request.messages]
    else:
        body["prompt"] = list(request.prompt)
    if config.extensions:
        # Servers cut the distribution by defaults of their own or of the model: llama.cpp by top-k and min-p,
        # vLLM by the model's generation_config.
        body |= {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        # vLLM and SGLang; llama.cpp tells ids beside log-probabilities
        body |= {"return_token_ids": True, "n_probs": 1}
    return body


@dataclass(frozen=True)
class AnswerReader:
    """Reads answers in the words of the target's own tokenizer."""

    encode: Callable[[str], list[int]]
    """A text to ids, without special tokens around it."""
    eos_ids: Sequence[int]
    eos_id: int
    """Stands at the end of an answer that ended by itself, where the server keeps that token to itself."""
    vocab_size: int

    def read(
        self, answer: Any, request: SampleRequest, max_new_tokens: int, *, asked: EndpointConfig
    ) -> Completion | Failure:
        """The completion in a response body, or why it cannot be used."""
        try:
            choice = answer["choices"][0]
            usage = answer.get("usage") or {}
            finish = choice["finish_reason"]
            if finish not in ("stop", "length"):
                return Failure(f"the server ended with finish_reason {finish!r}")
            wrong = _other_prompt(answer, choice, usage, request.prompt)
            if wrong:
                return Failure(wrong)
            tokens = _returned_ids(choice)
            reencoded = tokens is None
            if tokens is None:
                text = choice["message"]["content"] if asked.api == "chat" else choice["text"]
                tokens = self.encode(text)
            return self._checked(tokens, finish, usage.get("completion_tokens"), max_new_tokens, reencoded)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            return Failure(f"the answer is not of the OpenAI form ({type(error).__name__}: {error})")

    def _checked(
        self, tokens: list[int], finish: str, counted: int | None, max_new_tokens: int, reencoded: bool
    ) -> Completion | Failure:
        if any(not 0 <= token < self.vocab_size for token in tokens):
            return Failure(f"an id is outside the target's vocabulary of {self.vocab_size}")
        if any(token in self.eos_ids for token in tokens[:-1]):
            return Failure("the answer goes on behind an end-of-sequence token")
        if finish == "stop" and (not tokens or tokens[-1] not in self.eos_ids):
            tokens = [*tokens, self.eos_id]
        # Whether the end-of-sequence token counts differs from server to server.
        right = {len(tokens), len(tokens) - 1} if finish == "stop" else {len(tokens)}
        if counted is not None and counted not in right:
            how = "its text encodes to" if reencoded else "it returned"
            return Failure(f"the server counts {counted} tokens, but {how} {len(tokens)}")
        if len(tokens) == max_new_tokens + 1 and finish == "stop":
            tokens, finish = tokens[:-1], "length"  # the end that was not counted does not fit
        if not tokens or len(tokens) > max_new_tokens:
            return Failure(f"{len(tokens)} tokens, where 1 to {max_new_tokens} were asked for")
        return Completion(tokens, finish, None, reencoded)


def _other_prompt(answer: Any, choice: Any, usage: Any, prompt: Sequence[int]) -> str:
    """What is wrong with the prompt as the server read it; empty where nothing is known to be."""
    read = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    counted = usage.get("prompt_tokens")
    if read is not None and list(read) != list(prompt):
        return "the server read other token ids than were sent: its chat template or tokenizer is not ours"
    if counted is not None and counted != len(prompt):
        return (
            f"the server read {counted} prompt tokens where we have {len(prompt)}: its chat template or "
            "tokenizer is not ours"
        )
    return ""


def _returned_ids(choice: Any) -> list[int] | None:
    """The ids of the new tokens as the server tells them; None where it does not."""
    for key in ("token_ids", "response_token_ids"):
        if choice.get(key) is not None:
            return [_id(token) for token in choice[key]]
    content = (choice.get("logprobs") or {}).get("content")
    if content and all("id" in entry for entry in content):
        return [_id(entry["id"]) for entry in content]
    return None


def _id(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no token id")
    return value
