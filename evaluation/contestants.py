"""The decoders that race in an evaluation: over one target runner, by drafter and K."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.cost_model import round_cost
from evaluation.decoder.engine import Decoder
from evaluation.decoder.guard import Guard
from evaluation.decoder.kinds import make_drafter, make_tree_drafter
from evaluation.decoder.ngram import NgramDrafter
from evaluation.decoder.runner import Runner
from evaluation.measurements import Evaluation
from evaluation.speed import CHAIN_FROM, node_prices, sibling_threshold, stop_threshold, verify_overhead


def contestants(plan: Evaluation, costs: Mapping[str, Any], counts: Sequence[int]) -> dict[str, Decoder]:
    """Everyone at the batch size of `costs`.

    Plain decoding, and the drafter with K drafts a round, for every K of `counts`. At the serving batch size
    also "adaptive": the same drafter with up to the largest K, that stops where by the measured `costs` going
    on would not pay, under a guard that pauses it where it loses; "before": the drafter it was trained from,
    likewise; "tree": as adaptive, with trees as large as by the costs they pay, where the config asks for it
    and the cost model does not say that a chain is better; and n-gram look-up at the smallest K.
    """
    runner, model_drafter = plan.runner, plan.model_drafter
    served = costs["batch_size"] == plan.serving.batch_size
    if not served:
        runner = Runner(plan.model, costs["batch_size"], plan.length)
        model_drafter = make_drafter(plan.drafter, runner, plan.options, argmax=plan.argmax, int8=True)

    def decoder(drafter: Any, count: int, guard: Guard | None = None) -> Decoder:
        return Decoder(
            runner,
            eos_ids=plan.eos_ids,
            options=plan.options,
            drafter=drafter,
            num_speculative_tokens=count,
            guard=guard,
        )

    most = plan.config.num_speculative_tokens[-1]
    found = {"plain": decoder(None, 0)}
    found |= {f"model {count}": decoder(model_drafter, count) for count in counts}
    if not served:
        return found
    stopping = {"adaptive": plan.drafter} | ({"before": plan.before} if plan.before is not None else {})
    for name, model in stopping.items():
        adaptive = make_drafter(
            model, runner, plan.options, argmax=plan.argmax, stop_below=stop_threshold(costs), int8=True
        )
        found[f"{name} {most}"] = decoder(adaptive, most, guard(costs, most))
    if plan.config.tree and sibling_threshold(costs) < CHAIN_FROM:
        stop = {"stop_below": stop_threshold(costs), "int8": True}
        tree = make_tree_drafter(plan.drafter, runner, plan.options, node_prices(costs), plan.rates, **stop)
        found[f"tree {most}"] = decoder(tree, most, guard(costs, most))
    return found | {f"ngram {counts[0]}": decoder(NgramDrafter(), counts[0])}


def guard(costs: Mapping[str, Any], most: int) -> Guard:
    """One that knows what rounds of up to `most` draft steps cost."""
    widest = max(map(int, costs["verify_overhead"]))
    overheads = [verify_overhead(costs, drafts) for drafts in range(widest + 1)]
    return Guard([round_cost(costs, drafts) for drafts in range(most + 1)], overheads)
