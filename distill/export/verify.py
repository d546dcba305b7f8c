"""Proof of an export: load it again where it will be served, and compare with the trained drafter and with
plain decoding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.export.onnx_pair import MOST_DRAFTS
from distill.models import load_drafter, load_model

if TYPE_CHECKING:
    from distill.export.llama_cpp import Race
    from distill.export.runtimes import Runtime

ACCEPTANCE_TOLERANCE = 0.03


@dataclass(frozen=True)
class Verification:
    """Assisted against plain greedy decoding in transformers, float32."""

    prompts: int
    identical: int
    """Prompts whose tokens are the same; fewer than `prompts` means a broken export or a near tie."""
    tokens: int
    target_calls: int
    """Forward passes of the target that made those tokens, prompts included."""

    @property
    def tokens_per_target_call(self) -> float:
        """Above 1 only where drafted tokens were accepted."""
        return self.tokens / self.target_calls

    @property
    def ok(self) -> bool:
        return self.identical == self.prompts and self.tokens > self.target_calls


def same_logits(out_dir: Path, drafter_dir: Path, sequences: Sequence[Sequence[int]]) -> bool:
    """Does the Hugging Face export, loaded by transformers, give the trained drafter's logits bit for bit?

    Compared at every position of the token id sequences, over the ids that the drafter has; the other ids
    must never have the largest logit.
    """
    import torch
    from torch.nn.functional import linear

    drafter, exported = load_drafter(drafter_dir, "cpu"), load_model(out_dir, "auto").eval()
    rows = exported.get_output_embeddings().weight
    own = drafter.vocab
    if own is None:
        own = torch.arange(drafter.model.get_output_embeddings().weight.shape[0])
    own = own[own < len(rows)]
    head = drafter.model.get_output_embeddings().weight[: len(own)]
    with torch.inference_mode():
        for sequence in sequences:
            ids = torch.tensor([list(sequence)])
            # The same product on both sides: over more rows a library may sum in another order.
            wanted = linear(drafter.model.base_model(ids).last_hidden_state, head)
            found = linear(exported.base_model(ids).last_hidden_state, rows[own])
            choice = exported(ids).logits.argmax(dim=-1)
            if not torch.equal(found, wanted) or not bool(torch.isin(choice, own).all()):
                return False
    return True


def verify_hf(
    out_dir: Path, target_dir: Path, prompts: Sequence[str], max_new_tokens: int = 48
) -> Verification:
    """Load both directories again and let transformers decode each prompt plainly and with the drafter.

    The prompts go in as they are, without a chat template. Speculation is on only where the target was
    called less often than tokens came out, so the calls are counted.
    """
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out_dir, trust_remote_code=False)
    target, draft = (load_model(path, torch.float32).eval() for path in (target_dir, out_dir))
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    identical = tokens = 0
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        arguments = {**inputs, "do_sample": False, "max_new_tokens": max_new_tokens}
        plain = target.generate(**arguments)
        hook = target.register_forward_hook(count)
        assisted = target.generate(**arguments, assistant_model=draft)
        hook.remove()
        identical += int(torch.equal(plain, assisted))
        tokens += assisted.shape[1] - inputs["input_ids"].shape[1]
    return Verification(len(prompts), identical, tokens, calls)


def predicted_acceptance(
    drafter_dir: Path,
    target_dir: Path,
    prompts: Sequence[Sequence[int]],
    num_speculative_tokens: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
) -> float:
    """Accepted over drafted tokens that our own decoder counts for greedy decoding with a fixed K.

    Drafts behind the end of a text count as llama.cpp counts them: as drafted.
    """
    import torch

    from evaluation.decoder.drafters import ModelDrafter
    from evaluation.decoder.engine import Decoder, Request
    from evaluation.decoder.runner import Runner
    from evaluation.decoder.sampling import SamplingOptions

    options = SamplingOptions(0.0, 1.0)
    length = max(map(len, prompts)) + max_new_tokens + num_speculative_tokens + 1
    runner = Runner(load_model(target_dir, torch.float32).eval(), 1, length)
    decoder = Decoder(
        runner,
        eos_ids=eos_ids,
        options=options,
        drafter=ModelDrafter(load_drafter(drafter_dir, "cpu"), runner, options),
        num_speculative_tokens=num_speculative_tokens,
    )
    outputs = [decoder.generate([Request(prompt, max_new_tokens)])[0] for prompt in prompts]
    rounds = [pair for output in outputs for pair in output.rounds]
    return sum(accepted for _, accepted in rounds) / max(1, sum(proposed for proposed, _ in rounds))


def verify_gguf(
    out_dir: Path,
    drafter_dir: Path,
    target_dir: Path,
    served_target: Path | None,
    prompts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    seed: int,
) -> dict[str, Any]:
    """llama.cpp with the exported pair, twice: like for like, and as it is served.

    Like for like is the lossless drafter beside the target converted losslessly, where our own decoder
    predicts the acceptance; as served is `served_target` (default: the export's own) beside the drafter of
    the type that the scripts start. The verdict on speed comes from the pair as served.
    """
    from distill.export.gguf import convert, lossless_type, served_type
    from distill.export.llama_cpp import race, require_server

    require_server()
    predicted = predicted_acceptance(
        drafter_dir, target_dir, prompts, num_speculative_tokens, max_new_tokens, eos_ids
    )
    target_type, draft_type = lossless_type(target_dir), lossless_type(drafter_dir)
    with tempfile.TemporaryDirectory(prefix="distill-gguf-") as scratch:
        own = out_dir / f"target-{target_type}.gguf"
        if not own.is_file():
            own = Path(scratch) / own.name
            convert(target_dir, own, target_type)
        served = served_target or own
        pairs = {
            "like for like": (own, out_dir / f"draft-{draft_type}.gguf"),
            "as served": (served, out_dir / f"draft-{served_type(served)}.gguf"),
        }
        races = {
            name: race(target, draft, num_speculative_tokens, prompts, max_new_tokens, seed=seed)
            for name, (target, draft) in pairs.items()
        }
    like, as_served = races["like for like"], races["as served"]
    faults = [fault for name, run in races.items() for fault in _faults(name, run)]
    if abs(like.acceptance_rate - predicted) > ACCEPTANCE_TOLERANCE:
        faults.append(
            f"like for like: llama.cpp accepted {like.acceptance_rate:.3f} of the drafted tokens, our own "
            f"decoder {predicted:.3f}"
        )
    shown = {
        name: {
            "target": pairs[name][0].name,
            "draft": pairs[name][1].name,
            "acceptance_rate": run.acceptance_rate,
            "tokens_per_target_call": run.tokens_per_target_call,
            **asdict(run),
        }
        for name, run in races.items()
    }
    return {
        "predicted_acceptance_rate": predicted,
        "num_speculative_tokens": num_speculative_tokens,
        "races": shown,
        "faults": faults,
        "verdict": verdict(as_served, shown["as served"], num_speculative_tokens),
    }


def verify_genai(
    out_dir: Path,
    runtime: Runtime,
    drafter_dir: Path,
    target_dir: Path,
    prompts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
) -> dict[str, Any]:
    """OpenVINO GenAI or ONNX Runtime GenAI with the exported pair, greedily: is the text that of plain
    decoding there, and the acceptance what our own decoder predicts?
    """
    from distill.export.genai import decode
    from distill.export.runtimes import NAMES

    steps = min(num_speculative_tokens, MOST_DRAFTS) if runtime == "onnx" else num_speculative_tokens
    predicted = predicted_acceptance(drafter_dir, target_dir, prompts, steps, max_new_tokens, eos_ids)
    plain, ours = (decode(out_dir, runtime, prompts, max_new_tokens, plain=each) for each in (True, False))
    identical = sum(a["tokens"] == b["tokens"] for a, b in zip(plain, ours, strict=True))
    drafted, accepted = (sum(answer[key] for answer in ours) for key in ("drafted", "accepted"))
    rate, faults = accepted / max(1, drafted), []
    if not drafted:
        faults.append(f"{NAMES[runtime]} did not speculate")
    if identical < len(prompts):
        different = len(prompts) - identical
        faults.append(f"{NAMES[runtime]}: {different} of {len(prompts)} texts differ from plain decoding")
    if abs(rate - predicted) > ACCEPTANCE_TOLERANCE:
        faults.append(
            f"{NAMES[runtime]} accepted {rate:.3f} of the drafted tokens, our own decoder {predicted:.3f}"
        )
    return {
        "predicted_acceptance_rate": predicted,
        "acceptance_rate": rate,
        "num_speculative_tokens": steps,
        "prompts": len(prompts),
        "identical": identical,
        "drafted": drafted,
        "accepted": accepted,
        "faults": faults,
    }


def verdict(run: Race, files: Mapping[str, Any], num_speculative_tokens: int) -> str:
    """Does llama.cpp get faster with the pair as served? Below 1, or where the interval includes 1, why
    not.
    """
    speedup = run.speedup
    measured = (
        f"{speedup['mean']:.2f}x [{speedup['low']:.2f}, {speedup['high']:.2f}] its own plain speed "
        f"({run.plain_tokens_per_second:.1f} -> {run.tokens_per_second:.1f} tokens/s, {run.prompts} prompts, "
        f"{files['target']} with {files['draft']}, K = {num_speculative_tokens})"
    )
    if speedup["low"] > 1:
        return f"llama.cpp is faster with this drafter: {measured}."
    why = (
        f"a target call yields {run.tokens_per_target_call:.2f} tokens, but a round of drafting and checking "
        f"costs {run.round_cost:.2f} plain steps (each token of a wide forward alone {run.wide_cost:.2f})"
    )
    if speedup["mean"] >= 1:
        return f"llama.cpp is not clearly faster with this drafter: {measured}; {why}."
    return f"llama.cpp is slower with this drafter: {measured}, because {why}. Do not speculate there."


def _faults(name: str, run: Race) -> list[str]:
    faults = []
    if not run.drafted:
        faults.append(f"{name}: llama.cpp did not speculate")
    if not run.lossless:
        different = run.prompts - run.identical - run.near_ties
        faults.append(f"{name}: {different} of {run.prompts} texts differ from plain decoding")
    return faults
