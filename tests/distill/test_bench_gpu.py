"""The bench of a GPU, at tiny shapes on the CPU; where there is no card it says so."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from data.errors import UserError
from distill.bench import gpu
from distill.bench.gpu_counts import step_bytes

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
PLAN = gpu.Plan(
    target=LlamaConfig(**TINY),
    draft=LlamaConfig(**{**TINY, "num_hidden_layers": 1, "tie_word_embeddings": True}),
    dtype=torch.float32,
    device="cpu",
    prompt_tokens=6,
    new_tokens=12,
    num_speculative_tokens=3,
    batch_sizes=(1, 4),
    probe_bytes=1 << 16,
)


def test_every_part_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **settings: module)  # a compiler takes a minute
    said: list[str] = []
    found = gpu.bench(PLAN, said.append)
    assert json.loads(json.dumps(found)) == found
    assert not any("missing" in str(part) for part in found.values()), found
    assert found["plain"]["share_of_limit"] > 0
    assert found["round"]["cost_ratio"] > 0 and found["round"]["launches"] > 10
    for size in PLAN.batch_sizes:
        part = found[f"batch_{size}"]
        assert 1 < part["acceptance_0.6"]["tokens_per_target_call"] <= 4
        assert part["acceptance_0.8"]["speedup"] == pytest.approx(
            part["acceptance_0.8"]["tokens_per_second"] / part["plain_tokens_per_second"]
        )
    for name in ("transformers_assisted", "transformers_static_compiled"):
        assert found[name]["ratio"] > 0
    assert found["plain_compiled"]["tokens_per_second"] > 0
    assert len(said) == 7 and "plain_compiled: tokens_per_second" in gpu.report(found)


def test_what_begins_too_late_is_left_out_and_said_to_be() -> None:
    found = gpu.bench(replace(PLAN, minutes=0.0), lambda text: None)
    assert "minutes were over" in found["plain"]["missing"]


def test_a_step_reads_the_weights_once_and_the_cache_so_far() -> None:
    pair = gpu.Pair(PLAN)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    assert step_bytes(pair.target, 0) == 4 * (2 * layer + 32 + 64 * 32)
    assert step_bytes(pair.draft, 0) == 4 * (layer + 32 + 64 * 32)  # its head is its table
    assert step_bytes(pair.target, 10) - step_bytes(pair.target, 0) == 4 * 2 * 10 * 2 * 16


def test_the_shapes_are_those_of_the_models_they_are_named_after() -> None:
    with torch.device("meta"):
        target, draft = (gpu.LlamaForCausalLM(config) for config in (gpu.TARGET, gpu.DRAFT))
    assert sum(weight.numel() for weight in target.parameters()) == 8_030_261_248
    assert sum(weight.numel() for weight in draft.parameters()) == 1_235_814_400


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so() -> None:
    with pytest.raises(UserError, match="CUDA card"):
        gpu.bench(gpu.Plan(), lambda text: None)
