"""`distill bench`: its part of the command line, and the bench that is meant."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from data.errors import UserError
from distill.stages import Say, runs_folder

BENCHES = ("decoder", "sampling", "training", "alignment", "kinds", "gpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `distill bench` after the command's name."""
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument(
        "recipe",
        nargs="*",
        help="decoder, sampling: whose target, drafter and prompts (smollm2-135m); alignment: what all arms "
        "share (smollm2-135m-open); kinds: whose drafters to compare",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", help="change a setting; repeatable"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="alignment: tokens sampled, and trained on by each arm (50000)",
    )
    parser.add_argument("--arms", metavar="A,B", help="alignment: these alone; all where left out")
    parser.add_argument(
        "--seeds", metavar="N,N", help="alignment: train each arm with each of these (the recipe's)"
    )
    parser.add_argument(
        "--race", action="store_true", help="alignment: keep the arms' drafters, and measure their speedups"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def measure(options: argparse.Namespace, say: Say) -> tuple[dict[str, Any], str]:
    """Run the bench that `options` name: what it found, and the same as the user reads it."""
    own = (options.tokens, options.arms, options.seeds)
    if options.what != "alignment" and (own != (None, None, None) or options.race):
        raise UserError(
            "--tokens, --arms, --seeds and --race are for `distill bench alignment`: leave them out here"
        )
    if options.tokens is not None and options.tokens < 1:
        raise UserError(f"--tokens {options.tokens}: give a number of tokens, 1 or more")
    benches = {
        "decoder": _decoder,
        "sampling": _sampling,
        "training": _training,
        "alignment": _alignment,
        "kinds": _kinds,
        "gpu": _gpu,
    }
    return benches[options.what](options, say)


def _only(options: argparse.Namespace, default: str) -> str:
    """The one recipe of a bench that takes one."""
    if len(options.recipe) > 1:
        raise UserError(f"bench {options.what} takes one recipe")
    name: str = options.recipe[0] if options.recipe else default
    return name


def _decoder(options: argparse.Namespace, say: Say) -> tuple[dict[str, Any], str]:
    from distill.bench.command import bench, report
    from distill.recipe import load_recipe

    found = bench(load_recipe(_only(options, "smollm2-135m"), options.set), runs_folder(), say=say)
    return found, report(found)


def _sampling(options: argparse.Namespace, say: Say) -> tuple[dict[str, Any], str]:
    from distill.bench import sampling
    from distill.recipe import load_recipe

    found = sampling.bench(load_recipe(_only(options, "smollm2-135m"), options.set), runs_folder(), say)
    return found, sampling.report(found)


def _training(options: argparse.Namespace, say: Say) -> tuple[dict[str, Any], str]:
    from distill.bench import training

    if options.recipe or options.set:
        raise UserError("bench training compares random models of set sizes: leave the recipe out, and --set")
    found = training.bench(say)
    return found, training.report(found)


def _alignment(options: argparse.Namespace, say: Say) -> tuple[dict[str, Any], str]:
    from distill.bench.alignment import ARMS, TOKENS, bench
    from distill.bench.alignment_report import report

    name = _only(options, "smollm2-135m-open")
    arms = list(ARMS) if options.arms is None else options.arms.split(",")
    tokens = TOKENS if options.tokens is None else options.tokens
    found = bench(
        name, options.set, tokens, arms, runs_folder(), say, _seeds(options.seeds), race=options.race
    )
    sets = "".join(f" --set {each}" for each in options.set)
    sets += f" --arms {options.arms}" if options.arms is not None else ""
    if options.seeds is not None:
        sets += f" --seeds {options.seeds}"
    sets += " --race" if options.race else ""
    return found, report(found, f"distill bench alignment {name} --tokens {tokens}{sets}")


def _seeds(text: str | None) -> list[int]:
    if text is None:
        return []
    parts = text.split(",")
    if not all(re.fullmatch("[0-9]{1,9}", part) for part in parts) or len(set(parts)) < len(parts):
        raise UserError(f"--seeds {text}: give different whole numbers, such as 1,2")
    return [int(part) for part in parts]


def _kinds(options: argparse.Namespace, say: Say) -> tuple[dict[str, Any], str]:
    from distill.bench import kinds
    from distill.bench.race_report import report
    from distill.recipe import load_recipe

    if len(options.recipe) < 2:
        raise UserError("bench kinds compares drafters: name two recipes or more, all of them trained")
    recipes = [load_recipe(name, options.set) for name in options.recipe]
    found = kinds.bench_kinds(recipes, runs_folder(), say=say)
    return found, report(found)


def _gpu(options: argparse.Namespace, say: Say) -> tuple[dict[str, Any], str]:
    from distill.bench import gpu
    from distill.identity import environment

    if options.recipe or options.set:
        raise UserError("bench gpu decodes random models of set shapes: leave the recipe out, and --set")
    found = {"environment": environment(), **gpu.bench(gpu.Plan(), say)}
    path = runs_folder() / "bench-gpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found, f"{gpu.report(found)}\nwritten to {path}"
