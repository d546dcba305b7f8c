"""Which layers and how wide: importance on models whose dead parts are known, and cuts that lose nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.errors import UserError
from distill.drafter import DraftConfig, InitConfig, build_drafter
from distill.models import Target
from distill.prune import prune
from distill.shape import Activity, even_layers, important_layers, measure_activity, narrow, narrow_config
from tests.distill.conftest import VOCAB, tiny_llama

TEXTS = [list(range(3, 20)), [40, 41, 42, 7, 7, 9]]
COUNTS = torch.arange(VOCAB)


def test_even_layers_span_the_model() -> None:
    assert even_layers(30, 4) == [0, 10, 19, 29] and even_layers(30, 1) == [0]
    assert all(len(set(even_layers(9, count))) == count for count in range(1, 10))


def test_a_layer_that_does_nothing_is_the_least_important() -> None:
    model = tiny_llama(3)
    with torch.no_grad():
        for part in (model.model.layers[2].self_attn.o_proj, model.model.layers[2].mlp.down_proj):
            part.weight.zero_()
    change = measure_activity(model, TEXTS).change_L
    assert change[2].item() == pytest.approx(0, abs=1e-9) and (change[[0, 1, 3]] > 1e-3).all()
    assert important_layers(change, 3) == [0, 1, 3]
    assert important_layers(change, 1) == [int(change.argmax())]


def padded(model: LlamaForCausalLM, width: int, neurons: int) -> LlamaForCausalLM:
    """The same function in a wider model, its live dimensions and neurons scattered among dead ones."""
    small = model.config
    config = copy.deepcopy(small)
    config.hidden_size, config.intermediate_size, config.head_dim = width, neurons, small.head_dim
    config.rms_norm_eps = small.rms_norm_eps * small.hidden_size / width
    wide = LlamaForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(5)
    dims = torch.randperm(width, generator=generator)[: small.hidden_size].sort().values
    live = torch.randperm(neurons, generator=generator)[: small.intermediate_size].sort().values
    shrink = (small.hidden_size / width) ** 0.5  # a norm over mostly dead dimensions divides by less
    state = {}
    for name, value in wide.state_dict().items():
        own, new = model.state_dict()[name], torch.zeros_like(value)
        if name.endswith("norm.weight"):
            new[dims] = own * shrink
        elif "gate_proj" in name or "up_proj" in name:
            new[live[:, None], dims] = own
        elif "down_proj" in name:
            new[dims[:, None], live] = own
        elif "o_proj" in name:
            new[dims] = own
        else:
            new[:, dims] = own
        state[name] = new
    wide.load_state_dict(state)
    return wide


def test_dead_dimensions_and_neurons_go_without_a_trace() -> None:
    small = tiny_llama(4, hidden=32)
    wide = padded(small, 64, 128)
    ids = torch.tensor([TEXTS[0]])
    torch.testing.assert_close(wide(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-4)
    activity = measure_activity(wide, TEXTS)
    cut = narrow(wide, 32, activity, range(4))
    assert cut.config.hidden_size == 32 and cut.config.intermediate_size == 64
    torch.testing.assert_close(cut(ids).logits, small(ids).logits, rtol=1e-3, atol=1e-3)
    least_active = Activity(
        activity.change_L, activity.stream_LH.max() - activity.stream_LH, activity.neurons_LI
    )
    wrong = narrow(wide, 32, least_active, range(4))
    assert not torch.allclose(wrong(ids).logits, small(ids).logits, atol=0.1)


@pytest.mark.parametrize("width", [30, 32, 64])
def test_a_width_that_does_not_fit_is_refused(width: int) -> None:
    model = tiny_llama(4, hidden=32)
    with pytest.raises(UserError, match="multiple of the 4 attention heads"):
        narrow(model, width, measure_activity(model, TEXTS), range(4))


def build(target: Target, **options: Any) -> Any:
    init = InitConfig.model_validate({"from": "target", **options})
    config = DraftConfig(init=init, vocab_size=48)
    drafter = build_drafter(config, target, COUNTS, Path(), Path, TEXTS)
    assert drafter.vocab is not None and drafter.model.lm_head.weight.shape[0] == 48
    return drafter.model


def test_drafters_of_chosen_shapes(target: Target) -> None:
    expected = prune(target.model, even_layers(4, 2), target.model.lm_head.weight)
    even = build(target, layer_count=2, choose_by="even")
    for name, value in even.model.state_dict().items():
        assert torch.equal(value, expected.model.state_dict()[name])
    chosen = important_layers(measure_activity(target.model, TEXTS).change_L, 2)
    important = build(target, layer_count=2)
    torch.testing.assert_close(
        important.model.layers[1].mlp.up_proj.weight, target.model.model.layers[chosen[1]].mlp.up_proj.weight
    )
    narrower = build(target, layers=[0, 3], width=16)
    assert narrower.config.hidden_size == 16 and narrower.model.embed_tokens.weight.shape == (VOCAB, 16)
    assert narrower(torch.tensor([TEXTS[0]])).logits.isfinite().all()
    with pytest.raises(UserError, match="the source has 4 layers"):
        build(target, layer_count=5)


def test_config_of_layers_and_their_kinds() -> None:
    def init(**options: Any) -> InitConfig:
        return InitConfig.model_validate({"from": "target", **options})

    assert init().cuts is False
    assert all(init(**options).cuts for options in ({"layers": [0]}, {"layer_count": 2}, {"width": 8}))
    assert set(DraftConfig(init=init(layers=[0])).identity()["init"]) == {"from", "layers"}
    used = DraftConfig(init=init(layer_count=2)).identity()
    assert used["init"] == {"from": "target", "layers": None, "layer_count": 2, "choose_by": "importance"}


def test_llama_config_keeps_its_heads() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, intermediate_size=96)
    small = narrow_config(config, 32)
    assert (small.head_dim, small.num_attention_heads, small.intermediate_size) == (16, 4, 48)
    assert config.hidden_size == 64
