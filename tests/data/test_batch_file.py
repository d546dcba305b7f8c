"""The hand-off by batch files: out, in, round after round, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.batch_file import BatchFileEngine
from data.engines import Completion, Failure, SampleRequest
from data.errors import UserError
from data.openai_api import AnswerReader, EndpointConfig
from tests.data.fake_server import EOS, good_answer, requests

READER = AnswerReader(lambda text: [int(word[1:]) for word in text.split()], (EOS,), EOS, vocab_size=96)
CONFIG = EndpointConfig(model="target")
Shards = list[tuple[bool, int, list[tuple[SampleRequest, float]]]]


def shards(count: int, each: int = 4) -> Shards:
    """One held-out shard, then training ones."""
    asked = [(request, 1.0) for request in requests(count * each)]
    return [(number > 0, 0, asked[number * each : (number + 1) * each]) for number in range(count)]


def open_engine(folder: Path) -> BatchFileEngine:
    return BatchFileEngine(folder, CONFIG, READER)


def hand_off(folder: Path, tokens: int, count: int = 5) -> BatchFileEngine:
    engine = open_engine(folder)
    engine.hand_off(shards(count), 8, tokens)
    return engine


def asked_in(folder: Path, number: int) -> list[dict[str, Any]]:
    text = (folder / f"requests-{number}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def fill_in(folder: Path, number: int) -> list[dict[str, Any]]:
    """What a batch service makes of a file of requests; in another order, as the format allows."""
    rows = [
        {
            "id": f"batch_req_{i}",
            "custom_id": row["custom_id"],
            "response": {"status_code": 200, "request_id": "r", "body": good_answer(row["body"])},
            "error": None,
        }
        for i, row in enumerate(asked_in(folder, number))
    ][::-1]
    write(folder, number, rows)
    return rows


def write(folder: Path, number: int, rows: list[dict[str, Any]]) -> None:
    text = "\n".join(json.dumps(row) for row in rows)
    (folder / f"answers-{number}.jsonl").write_text(text)


def results(engine: BatchFileEngine, count: int) -> list[Completion | Failure]:
    return engine.sample(requests(count), temperature=1.0, max_new_tokens=8, on_tokens=lambda count: None)


def test_requests_go_out_in_the_batch_format_and_the_message_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"requests-1\.jsonl.*answers-1\.jsonl.*run the same command again"):
        hand_off(tmp_path, tokens=60)
    rows = asked_in(tmp_path, 1)
    # A held-out shard, then as many training shards as reach 60 tokens at 8 an answer.
    assert [row["custom_id"] for row in rows] == [f"p{index}" for index in range(12)]
    assert {row["method"] for row in rows} == {"POST"} and {row["url"] for row in rows} == {"/v1/completions"}
    assert rows[3]["body"]["prompt"] == [7, 6] and rows[3]["body"]["model"] == "target"


def test_until_it_is_filled_in_the_file_is_asked_for_again(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match=r"answers-1\.jsonl"):
            hand_off(tmp_path, tokens=60)
    assert not (tmp_path / "requests-2.jsonl").exists()


def test_answers_come_back_in_order_and_more_is_asked_for_only_where_the_budget_needs_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError):
        hand_off(tmp_path, tokens=60)
    fill_in(tmp_path, 1)
    # 8 training answers have 4 tokens each, 32 of 60: two more shards of four make 64.
    with pytest.raises(UserError, match=r"requests-2\.jsonl"):
        hand_off(tmp_path, tokens=60)
    assert [row["custom_id"] for row in asked_in(tmp_path, 2)] == [f"p{index}" for index in range(12, 20)]
    fill_in(tmp_path, 2)
    done = results(hand_off(tmp_path, tokens=60), 20)
    expected = [[3 + request.seed % 2**31 % 40, 5, 6, EOS] for request in requests(20)]
    assert [result.tokens for result in done if isinstance(result, Completion)] == expected
    assert not (tmp_path / "requests-3.jsonl").exists()


def test_what_is_on_disk_is_not_asked_for_again(tmp_path: Path) -> None:
    """A session that was killed between two shards, or a larger budget that took shards over."""
    _, _, *rest = shards(5)
    with pytest.raises(UserError):
        open_engine(tmp_path).hand_off([(False, 99, []), (True, 30, []), *rest], 8, 60)
    assert [row["custom_id"] for row in asked_in(tmp_path, 1)] == [f"p{index}" for index in range(8, 12)]
    done = tmp_path / "done"
    BatchFileEngine(done, CONFIG, READER).hand_off([(False, 0, []), (True, 60, []), *rest], 8, 60)
    assert not done.exists()


def test_errors_and_missing_lines_fail_their_samples_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        hand_off(tmp_path, tokens=60)
    rows = {row["custom_id"]: row for row in fill_in(tmp_path, 1)}
    rows["p1"] |= {"response": None, "error": {"code": "batch_expired"}}
    rows["p2"]["response"] = {"status_code": 500, "body": {"error": "oops"}}
    del rows["p3"]
    write(tmp_path, 1, list(rows.values()))
    done = results(open_engine(tmp_path), 5)
    assert [isinstance(result, Failure) for result in done] == [False, True, True, True, False]
    assert [says in str(done[index]) for index, says in ((1, "batch_expired"), (2, "oops"), (3, "no answer"))]


def test_answers_that_cannot_be_used_are_asked_for_elsewhere(tmp_path: Path) -> None:
    """They count as nothing, whatever tokens the service says they have."""
    with pytest.raises(UserError):
        hand_off(tmp_path, tokens=32)
    rows = {row["custom_id"]: row for row in fill_in(tmp_path, 1)}
    for name in ("p5", "p6"):  # of the training shards that were to reach the budget
        rows[name]["response"]["body"]["choices"][0]["finish_reason"] = "content_filter"
    write(tmp_path, 1, list(rows.values()))
    with pytest.raises(UserError, match=r"requests-2\.jsonl"):
        hand_off(tmp_path, tokens=16)
    assert len(asked_in(tmp_path, 2)) == 4


def test_a_batch_that_failed_whole_ends_the_work(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        hand_off(tmp_path, tokens=60)
    rows = [{**row, "error": {"code": "no_credit"}, "response": None} for row in fill_in(tmp_path, 1)]
    write(tmp_path, 1, rows)
    with pytest.raises(UserError, match=r"10 answers in a row failed.*no_credit"):
        results(open_engine(tmp_path), 12)


def test_answers_of_another_batch_and_broken_lines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        hand_off(tmp_path, tokens=60)
    write(tmp_path, 1, [{"custom_id": "other"}])
    with pytest.raises(UserError, match="answers none of the requests"):
        open_engine(tmp_path)
    (tmp_path / "answers-1.jsonl").write_text('{"custom_id": "p0"}\n{half')
    with pytest.raises(UserError, match=r"answers-1\.jsonl:2: not JSON"):
        open_engine(tmp_path)


def test_chat_sends_messages(tmp_path: Path) -> None:
    engine = BatchFileEngine(tmp_path, EndpointConfig(model="m", api="chat", extensions=False), READER)
    request = SampleRequest([1, 2], 5, "a", (("system", "Be brief."), ("user", "Hello")))
    with pytest.raises(UserError):
        engine.hand_off([(True, 0, [(request, 0.0)])], 8, 100)
    (row,) = asked_in(tmp_path, 1)
    assert row["url"] == "/v1/chat/completions"
    assert row["body"] == {
        "model": "m",
        "max_tokens": 8,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 5,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    }
