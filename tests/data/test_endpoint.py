"""The engine `openai` against a server that is busy, broken, slow, wrong or gone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pydantic import ValidationError

from data import endpoint
from data.endpoint import EndpointEngine
from data.engines import FAILURES_IN_A_ROW, Completion, Failure
from data.errors import UserError
from data.openai_api import AnswerReader, EndpointConfig
from tests.data.fake_server import EOS, Behaviour, fake_server, good_answer, requests

READER = AnswerReader(lambda text: [int(word[1:]) for word in text.split()], (EOS,), EOS, vocab_size=96)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(endpoint, "LONGEST_WAIT", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def engine(url: str, **settings: Any) -> EndpointEngine:
    return EndpointEngine(EndpointConfig(model="target", url=url, **settings), READER)


def sample(url: str, count: int = 6, **settings: Any) -> tuple[list[Completion | Failure], int]:
    heard: list[int] = []
    results = engine(url, **settings).sample(
        requests(count), temperature=1.0, max_new_tokens=8, on_tokens=heard.append
    )
    return results, sum(heard)


def tokens_of(results: list[Completion | Failure]) -> list[list[int]]:
    assert all(isinstance(result, Completion) for result in results), results
    return [result.tokens for result in results if isinstance(result, Completion)]


EXPECTED = [[3 + request.seed % 2**31 % 40, 5, 6, EOS] for request in requests(6)]


def test_answers_come_in_order_with_the_servers_ids_and_a_few_at_a_time() -> None:
    with fake_server(lambda body, times: (200, good_answer(body))) as fake:
        results, heard = sample(fake.url, count=6, concurrency=3)
    assert tokens_of(results) == EXPECTED
    assert heard == 24
    assert not any(result.reencoded for result in results if isinstance(result, Completion))
    assert 1 < fake.most_at_once <= 3
    body = fake.asked[0]
    # Without these, llama.cpp and vLLM cut the distribution by defaults of their own.
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, -1, 0.0)
    assert all(type(token) is int for token in body["prompt"])
    assert "Authorization" not in fake.headers[0]


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k-123")
    with fake_server(lambda body, times: (200, good_answer(body))) as fake:
        sample(fake.url, count=1)
    assert fake.headers[0]["Authorization"] == "Bearer k-123"


PASSING: dict[str, Behaviour] = {
    "busy": lambda body, times: (429, {"error": "slow down"}) if times < 3 else (200, good_answer(body)),
    "broken": lambda body, times: (500, b"oops") if times < 3 else (200, good_answer(body)),
    "garbage": lambda body, times: (200, b"<html>") if times < 3 else (200, good_answer(body)),
    "hangs": lambda body, times: None if times == 1 and body["seed"] % 2 else (200, good_answer(body)),
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_may_pass_is_asked_again(fault: str) -> None:
    with fake_server(PASSING[fault]) as fake:
        results, _ = sample(fake.url, timeout_seconds=0.3)
    assert tokens_of(results) == EXPECTED
    assert len(fake.asked) > 6


def test_a_server_that_dies_and_comes_back_loses_nothing() -> None:
    with fake_server(lambda body, times: (200, good_answer(body))) as fake:
        asker = engine(fake.url)
    port = int(fake.url.split(":")[2].split("/")[0])
    found: list[Any] = []

    def ask() -> None:
        found.extend(
            asker.sample(requests(6), temperature=1.0, max_new_tokens=8, on_tokens=lambda count: None)
        )

    thread = threading.Thread(target=ask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint, "LONGEST_WAIT", 0.5)
        patch.setattr(endpoint, "FIRST_WAIT", 0.1)
        thread.start()
        with fake_server(lambda body, times: (200, good_answer(body)), port) as again:
            thread.join(10)
    assert tokens_of(found) == EXPECTED
    assert len(again.asked) == 6


def test_one_bad_request_fails_alone_and_is_not_repeated() -> None:
    def behave(body: dict[str, Any], times: int) -> tuple[int, Any]:
        return (400, {"error": "too long"}) if body["prompt"][1] == 5 else (200, good_answer(body))

    with fake_server(behave) as fake:
        results, _ = sample(fake.url)
    assert [index for index, result in enumerate(results) if isinstance(result, Failure)] == [2]
    assert "HTTP 400" in str(results[2]) and "too long" in str(results[2])
    assert len(fake.asked) == 6


def test_many_failures_in_a_row_end_the_work() -> None:
    with (
        fake_server(lambda body, times: (503, b"loading")) as fake,
        pytest.raises(UserError, match=rf"{FAILURES_IN_A_ROW} answers in a row.*HTTP 503: loading"),
    ):
        sample(fake.url, count=200, concurrency=4)
    assert len(fake.asked) < 200


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_address_is_said_at_once_and_without_the_key(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k-123")
    with (
        fake_server(lambda body, times: (status, b"no k-123 here")) as fake,
        pytest.raises(UserError, match=rf"HTTP {status}: no \*\*\* here.*OPENAI_API_KEY"),
    ):
        sample(fake.url, count=1)
    assert len(fake.asked) == 1


def test_no_server_is_said_before_any_work() -> None:
    with fake_server(lambda body, times: (200, {})) as fake:
        pass
    with pytest.raises(UserError, match=r"no server answers at .*: start it"):
        engine(fake.url)


WRONG = {
    "counts other new tokens": ({"usage": {"prompt_tokens": 2, "completion_tokens": 9}}, {}, "counts 9"),
    "counts another prompt": ({"usage": {"prompt_tokens": 5, "completion_tokens": 4}}, {}, "5 prompt tokens"),
    "read another prompt": ({}, {"prompt_token_ids": [1, 2]}, "other token ids"),
    "an id out of range": ({}, {"token_ids": [3, 5, 96, EOS]}, "outside"),
    "a text for an id": ({}, {"token_ids": [3, "5", 6, EOS]}, "no token id"),
    "goes on behind the end": ({}, {"token_ids": [3, EOS, 6, EOS]}, "behind an end"),
    "stopped by a filter": ({}, {"finish_reason": "content_filter"}, "content_filter"),
    "too long": ({"usage": {}}, {"token_ids": [5] * 9, "finish_reason": "length"}, "9 tokens, where 1 to 8"),
    "nothing": ({"usage": {}}, {"token_ids": [], "finish_reason": "length"}, "0 tokens"),
    "no choices": ({"choices": []}, {}, "OpenAI form"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_an_answer_that_cannot_be_right_fails(fault: str) -> None:
    top, choice, says = WRONG[fault]
    with fake_server(lambda body, times: (200, {**good_answer(body, **choice), **top})) as fake:
        (result,), heard = sample(fake.url, count=1)
    assert isinstance(result, Failure) and says in result.reason
    assert heard == 0


def test_text_alone_is_encoded_again_and_marked() -> None:
    with fake_server(lambda body, times: (200, good_answer(body, token_ids=None))) as fake:
        results, _ = sample(fake.url)
    assert tokens_of(results) == EXPECTED  # with the end that the text does not show
    assert all(result.reencoded for result in results if isinstance(result, Completion))


def test_text_that_encodes_to_another_number_of_tokens_fails() -> None:
    # The target chose other ids for this text than our tokenizer: training on them would teach its habits.
    with fake_server(lambda body, times: (200, good_answer(body, token_ids=None, text="w3 w4"))) as fake:
        (result,), _ = sample(fake.url, count=1)
    assert result == Failure("the server counts 4 tokens, but its text encodes to 3")


@pytest.mark.parametrize(
    "ids",
    [
        {"response_token_ids": [3, 5, 6, EOS]},  # SGLang
        {"logprobs": {"content": [{"id": 3}, {"id": 5}, {"id": 6}, {"id": EOS}]}},  # llama.cpp
        {"token_ids": [3, 5, 6]},  # a server that keeps the end to itself
    ],
)
def test_ids_are_found_where_servers_put_them(ids: dict[str, Any]) -> None:
    with fake_server(lambda body, times: (200, good_answer(body, **{"token_ids": None, **ids}))) as fake:
        results, _ = sample(fake.url, count=1)
    assert results == [Completion([3, 5, 6, EOS], "stop", None, reencoded=False)]


def test_an_end_that_does_not_fit_makes_the_answer_a_long_one() -> None:
    request = requests(1)[0]
    answer = good_answer({"seed": 0, "max_tokens": 8, "prompt": list(request.prompt)}, token_ids=[3, 5, 6])
    answer["usage"]["completion_tokens"] = 3
    read = READER.read(answer, request, 3, asked=EndpointConfig(model="m"))
    assert read == Completion([3, 5, 6], "length", None)


@pytest.mark.parametrize("url", ["ftp://x/v1", "localhost:80", "http://me:key@x/v1", "https://x/v1?key=1"])
def test_addresses_that_are_none_or_hold_secrets_are_refused(url: str) -> None:
    with pytest.raises(ValidationError, match=r"http://HOST|no secrets"):
        EndpointConfig(model="m", url=url)


def test_only_what_decides_the_samples_is_part_of_the_identity() -> None:
    base = EndpointConfig(model="m", url="http://a/v1")
    for same in ({"url": "http://b/v1"}, {"concurrency": 1}, {"timeout_seconds": 1.0}):
        assert base.model_copy(update=same).identity() == base.identity()
    for other in ({"model": "n"}, {"api": "chat"}, {"extensions": False}):
        assert base.model_copy(update=other).identity() != base.identity()
