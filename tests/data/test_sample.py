"""The sampling stage over a scripted engine: budgets, splits, seeds, resumption and quarantine."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from data.engines import Completion, Failure, SampleRequest
from data.errors import UserError
from data.prompts import Prompt
from data.records import open_samples, shard_path
from data.sample import SampleConfig, plan, run, sample_seed
from data.sample_summary import budget_notes
from data.signals import Signals
from data.take_over import take_over


class ScriptedEngine:
    """Answers with a function of prompt and seed alone, and remembers what it was asked."""

    def __init__(
        self, fail_after: int | None = None, fails: Callable[[SampleRequest], bool] | None = None
    ) -> None:
        self.fails = fails
        self.asked: list[tuple[SampleRequest, float]] = []
        self.fail_after = fail_after

    def sample(self, requests, *, temperature, max_new_tokens, on_tokens):
        if self.fail_after is not None and len(self.asked) + len(requests) > self.fail_after:
            raise KeyboardInterrupt
        self.asked += [(request, temperature) for request in requests]
        done = []
        for request in requests:
            if self.fails and self.fails(request):
                done.append(Failure("no luck"))
                continue
            length = 1 + request.seed % max_new_tokens
            tokens = [(request.seed >> shift) % 50 for shift in range(length)]
            hidden = torch.full((length, 2), float(request.prompt[0]))
            signals = Signals(hidden, torch.zeros(length), torch.tensor(tokens))
            done.append(Completion(tokens, "length", signals))
            on_tokens(length)
        return done


def prompts(count: int = 300) -> list[tuple[Prompt, list[int]]]:
    def split(i: int) -> tuple[str, bool]:
        return [("select", True), ("test", True), ("test", False)][i % 3] if i < 60 else ("train", True)

    return [
        (Prompt(f"id{i}", "s", "task", "template", (("user", str(i)),), *split(i)), [i % 40, i % 7])
        for i in range(count)
    ]


CONFIG = SampleConfig(temperature=[0.0, 1.0], max_new_tokens=8, tokens=400, batch_size=24)


def sample(
    directory: Path,
    engine: ScriptedEngine,
    config: SampleConfig = CONFIG,
    elsewhere: Sequence[Path] = (),
    held_out: int = 5,
) -> int:
    heard: list[int] = []
    take_over(plan(prompts(), config, held_out=held_out, seed=1), elsewhere, directory)
    total = run(
        prompts(), engine, config, held_out=held_out, seed=1, directory=directory, on_tokens=heard.append
    )
    assert sum(heard) == total  # progress counts the training tokens, as the budget does
    return total


def contents(directory: Path) -> list[tuple]:
    return [(r.prompt_id, r.split, r.temperature, tuple(r.input_ids)) for r in open_samples(directory)]


def test_the_budget_counts_training_tokens_and_ends_with_a_whole_shard(tmp_path: Path) -> None:
    total = sample(tmp_path, ScriptedEngine())
    samples = open_samples(tmp_path)
    assert total == samples.where(split="train").completion_tokens >= 400
    per_shard = [len(shard) for shard in plan(prompts(), CONFIG, held_out=5, seed=1)]
    assert len(samples) < sum(per_shard)


def test_held_out_prompts_come_whole_and_test_prompts_at_every_temperature(tmp_path: Path) -> None:
    sample(tmp_path, ScriptedEngine())
    samples = open_samples(tmp_path)
    for seen in (True, False):
        test = samples.where(split="test", seen_template=seen)
        for temperature in (0.0, 1.0):
            assert len(test.where(temperature=temperature)) == 5
    assert len(samples.where(split="select")) == 5


def test_an_interrupted_run_goes_on_and_gives_the_same_samples(tmp_path: Path) -> None:
    sample(tmp_path / "straight", ScriptedEngine())
    with pytest.raises(KeyboardInterrupt):
        sample(tmp_path / "broken", ScriptedEngine(fail_after=80))
    before = {path.name: path.read_bytes() for path in (tmp_path / "broken").glob("*.parquet")}
    assert before, "the interruption came before the first shard: nothing to resume"
    engine = ScriptedEngine()
    sample(tmp_path / "broken", engine)
    assert contents(tmp_path / "broken") == contents(tmp_path / "straight")
    assert len(engine.asked) < len(open_samples(tmp_path / "straight"))
    for name, content in before.items():
        assert (tmp_path / "broken" / name).read_bytes() == content


def test_a_larger_budget_goes_on_where_a_smaller_one_stopped(tmp_path: Path) -> None:
    small, large = CONFIG, CONFIG.model_copy(update={"tokens": 900})
    sample(tmp_path / "small", ScriptedEngine(), small)
    whole, rest = ScriptedEngine(), ScriptedEngine()
    sample(tmp_path / "straight", whole, large)
    sample(tmp_path / "large", rest, large, [tmp_path / "small"])
    assert contents(tmp_path / "large") == contents(tmp_path / "straight")
    assert len(rest.asked) == len(whole.asked) - len(open_samples(tmp_path / "small"))
    # The other way round takes no more than it needs.
    none = ScriptedEngine()
    sample(tmp_path / "again", none, small, [tmp_path / "large"])
    assert not none.asked and contents(tmp_path / "again") == contents(tmp_path / "small")


def test_a_samples_seed_is_its_own() -> None:
    seeds = {sample_seed(s, p, i) for s in (0, 1) for p in ("a", "b") for i in (0, 1)}
    assert len(seeds) == 8
    assert sample_seed(0, "a", 0) == sample_seed(0, "a", 0)


@pytest.mark.parametrize("temperatures", [[0.0], [0.0, 1.0], [0.0, 0.0, 1.0]])
def test_no_prompt_is_answered_greedily_twice(temperatures: list[float]) -> None:
    config = CONFIG.model_copy(update={"temperature": temperatures, "samples_per_prompt": 3})
    planned = [sample for shard in plan(prompts(), config, held_out=5, seed=1) for sample in shard]
    greedy = [sample.prompt.id for sample in planned if sample.temperature == 0]
    assert greedy and len(set(greedy)) == len(greedy)
    tested = [sample for sample in planned if sample.prompt.split == "test" and sample.temperature == 1.0]
    assert len(tested) == (30 if 1.0 in temperatures else 0)  # the others are as many as they were asked for


def test_too_few_prompts_for_the_budget_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"under half of sample\.tokens"):
        sample(tmp_path, ScriptedEngine(), CONFIG.model_copy(update={"tokens": 100_000}))


@pytest.mark.parametrize("temperatures", [[], [-1.0], [0.0, -0.5]])
def test_impossible_temperatures_are_refused(temperatures: list[float]) -> None:
    with pytest.raises(ValueError, match="temperature"):
        SampleConfig(temperature=temperatures, max_new_tokens=8, tokens=10)


def test_a_leftover_of_a_half_written_shard_is_ignored(tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    shard_path(tmp_path, 0).with_suffix(".tmp").write_bytes(b"half")
    sample(tmp_path, ScriptedEngine())
    assert contents(tmp_path)


def test_a_repeated_temperature_gets_a_larger_share() -> None:
    config = CONFIG.model_copy(update={"temperature": [0.0, 0.0, 0.0, 1.0]})
    planned = [sample for shard in plan(prompts(), config, held_out=5, seed=1) for sample in shard]
    train = [sample.temperature for sample in planned if sample.prompt.split == "train"]
    assert train.count(0.0) == 3 * train.count(1.0) == 180
    test = [sample.temperature for sample in planned if sample.prompt.split == "test"]
    assert test.count(0.0) == test.count(1.0) == 10


# Quarantine and summary.


def test_failed_samples_are_quarantined_and_counted_and_the_others_stay_as_they_are(tmp_path: Path) -> None:
    sample(tmp_path / "all", ScriptedEngine())
    total = sample(tmp_path / "some", ScriptedEngine(fails=lambda request: request.prompt[0] % 10 == 3))
    kept = set(contents(tmp_path / "some"))
    assert kept & set(contents(tmp_path / "all")), "nothing in common: the failures changed the others"
    assert {ids[0] % 10 for *_, ids in kept} == set(range(10)) - {3}
    summary = json.loads((tmp_path / "some" / "samples.json").read_text())
    lines = [
        json.loads(line)
        for path in (tmp_path / "some").glob("quarantine-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert summary["quarantined"] == len(lines) > 0
    assert summary["quarantine_reasons"] == {"no luck": len(lines)}
    assert len({line["id"] for line in lines}) == len(lines)
    assert summary["train"]["completion_tokens"] == total
    assert summary["all"]["samples"] == len(open_samples(tmp_path / "some"))
    assert not list((tmp_path / "all").glob("quarantine-*"))


def test_a_shard_of_failures_alone_ends_the_work_and_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"all 5 samples of a shard failed.*no luck"):
        sample(tmp_path, ScriptedEngine(fails=lambda request: True))
    assert not list(tmp_path.glob("samples-*"))


class EndingEngine:
    """Of every three answers one is empty, one ends by itself and one is cut."""

    def sample(self, requests, *, temperature, max_new_tokens, on_tokens):
        answers = [([9], "stop"), ([5, 8], "stop"), ([5] * max_new_tokens, "length")]
        done = [Completion(*answers[request.prompt[1] % 3], None) for request in requests]
        for completion in done:
            on_tokens(len(completion.tokens))
        return done


def test_the_summary_says_how_answers_end(tmp_path: Path) -> None:
    sample(tmp_path, EndingEngine())  # type: ignore[arg-type]
    whole = json.loads((tmp_path / "samples.json").read_text())["all"]
    records = list(open_samples(tmp_path))
    kinds = [record.input_ids[1] % 3 for record in records]
    assert (whole["truncated"], whole["empty"]) == (kinds.count(2), kinds.count(0))
    assert whole["truncated_share"] == pytest.approx(kinds.count(2) / len(records), abs=1e-4)
    assert whole["eos"] == {"8": kinds.count(1), "9": kinds.count(0)}
    assert (whole["length"]["min"], whole["length"]["max"]) == (1, 8)
    assert whole["reencoded"] == 0


def test_the_mark_of_reencoded_answers_survives_and_costs_others_nothing(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    class Reencoding(EndingEngine):
        def sample(self, requests, **options):
            done = super().sample(requests, **options)
            for request, completion in zip(requests, done, strict=True):
                completion.reencoded = request.prompt[0] % 2 == 0
            return done

    sample(tmp_path / "exact", EndingEngine())  # type: ignore[arg-type]
    sample(tmp_path / "text", Reencoding())  # type: ignore[arg-type]
    assert "reencoded" not in parquet.read_schema(shard_path(tmp_path / "exact", 0)).names
    marks = [record.reencoded for record in open_samples(tmp_path / "text")]
    assert marks == [record.input_ids[0] % 2 == 0 for record in open_samples(tmp_path / "text")]
    assert {True, False} == set(marks)


# Engines in a recipe.

SERVER = {"model": "m", "url": "http://127.0.0.1:1/v1"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"engine": "openai"}, "needs an endpoint"),
        ({"engine": "batch"}, "needs an endpoint"),
        ({"engine": "openai", "endpoint": {"model": "m"}}, r"needs endpoint\.url"),
        ({"endpoint": SERVER}, "leave it out with builtin"),
        ({"engine": "openai", "endpoint": SERVER, "vllm": {}}, "leave them out with openai"),
    ],
)
def test_an_engine_gets_what_it_needs_and_nothing_else(settings: dict, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        SampleConfig(max_new_tokens=8, tokens=10, **settings)


def test_options_that_are_not_in_use_leave_the_identity_as_it_was_before_there_were_any() -> None:
    assert CONFIG.identity() == {
        "engine": "builtin",
        "temperature": [0.0, 1.0],
        "samples_per_prompt": 1,
        "max_new_tokens": 8,
        "tokens": 400,
        "batch_size": 24,
    }
    served = SampleConfig(engine="openai", max_new_tokens=8, tokens=400, endpoint=SERVER)  # type: ignore[arg-type]
    assert served.identity()["endpoint"] == {"model": "m", "api": "completions", "extensions": True}


def test_prompts_that_end_before_the_budget_are_noted() -> None:
    assert budget_notes(1200, 1200) == []
    (note,) = budget_notes(1066, 1200)
    assert "ended at 1,066 of sample.tokens = 1,200" in note
