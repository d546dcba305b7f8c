"""Which samples make which batch."""

from distill.batch_plan import BatchPlan, plan_batches

SIZES = [(length, 1 + length // 3) for length in (5, 9, 30, 7, 12, 31, 8, 6, 29, 11)]


def test_plan_meets_the_budget_and_repeats() -> None:
    plan = plan_batches(SIZES, batch_size=3, tokens=120, accumulation=1, seed=1)
    assert sum(plan.tokens) >= 120 > sum(plan.tokens[:-1])
    assert plan.tokens == [sum(SIZES[index][1] for index in batch) for batch in plan.batches]
    assert plan == plan_batches(SIZES, batch_size=3, tokens=120, accumulation=1, seed=1)
    assert plan != plan_batches(SIZES, batch_size=3, tokens=120, accumulation=1, seed=2)
    per_epoch = -(-len(SIZES) // 3)
    assert sorted(index for batch in plan.batches[:per_epoch] for index in batch) == list(
        range(len(SIZES))
    )  # each once before any twice


def test_plan_is_whole_steps() -> None:
    plan = plan_batches(SIZES, batch_size=2, tokens=100, accumulation=3, seed=0)
    assert len(plan.batches) % 3 == 0 and plan.steps == len(plan.batches) // 3
    assert plan.tokens_after(0) == 0 and plan.tokens_after(plan.steps) == sum(plan.tokens)
    assert plan.tokens_after(1) == sum(plan.tokens[:3])


def test_processes_share_each_batch() -> None:
    plan = BatchPlan([[5, 6, 7, 8], [9]], [10, 2], 1)
    assert plan.shares(1) == plan.batches
    assert plan.shares(2) == [[5, 7], [6, 8], [9], []]  # process 0 takes every second row, from 0 on


def test_plan_keeps_like_lengths_together() -> None:
    plan = plan_batches(SIZES * 20, batch_size=10, tokens=700, accumulation=1, seed=0)
    sizes = SIZES * 20

    def padding(batches: list[list[int]]) -> int:
        return sum(
            max(sizes[i][0] for i in batch) * len(batch) - sum(sizes[i][0] for i in batch)
            for batch in batches
        )

    in_order = [list(range(first, first + 10)) for first in range(0, 200, 10)]
    assert padding(plan.batches) < 0.3 * padding(in_order[: len(plan.batches)])
