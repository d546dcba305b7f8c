"""Public Medusa and EAGLE-3 checkpoints: names, shapes and values, written and read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.errors import UserError
from distill.head_layouts import from_public, to_public, to_speculators, to_tgi
from distill.models import Target, load_drafter
from evaluation.decoder.drafters import DraftModel
from evaluation.decoder.eagle import LAYERS, start_eagle
from evaluation.decoder.medusa import start_medusa

VOCAB = torch.arange(0, 96, 3)
V, H, F = 96, 32, 64  # ids, width and feed-forward width of the tiny target


def drafter(kind: str, target: Target, vocab: torch.Tensor | None = VOCAB) -> DraftModel:
    torch.manual_seed(0)
    model: Any
    if kind == "eagle":
        model = start_eagle(target.model, vocab, 3)
    else:
        model = start_medusa(target.model, vocab, 3, shared_head=kind == "shared")
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    model.config.dtype = torch.float32
    return DraftModel(model, vocab)


def write(folder: Path, draft: DraftModel) -> None:
    config, tensors = to_public(draft)
    (folder / "config.json").write_text(json.dumps(config, default=str))
    save_file(tensors, folder / "model.safetensors")


def same_proposals(one: DraftModel, other: DraftModel) -> bool:
    text = torch.randn(2, 7, H), torch.randn(2, 7, one.model.fc.in_features if "fc" in dir(one.model) else H)
    from evaluation.decoder.heads import Text

    with torch.no_grad():
        first, second = (list(draft.model.rollout(Text(*text))) for draft in (one, other))
        return all(
            torch.allclose(one.model.head(k)(a), other.model.head(k)(b), atol=1e-6)
            for k, (a, b) in enumerate(zip(first, second, strict=False))
        )


def test_eagles_names_and_shapes(target: Target) -> None:
    config, tensors = to_public(drafter("eagle", target))
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    assert shapes == {
        "fc.weight": (H, 3 * H),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (H, 2 * H),
        "midlayer.self_attn.k_proj.weight": (H // 2, 2 * H),
        "midlayer.self_attn.v_proj.weight": (H // 2, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, H),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.mlp.gate_proj.weight": (F, H),
        "midlayer.mlp.up_proj.weight": (F, H),
        "midlayer.mlp.down_proj.weight": (H, F),
        "norm.weight": (H,),
        "lm_head.weight": (len(VOCAB), H),
        "d2t": (len(VOCAB),),
        "t2d": (V,),
    }
    assert torch.equal(torch.arange(len(VOCAB)) + tensors["d2t"], VOCAB)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], VOCAB)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 1
    assert config["draft_vocab_size"] == len(VOCAB) and config["vocab_size"] == V
    assert config[LAYERS] == [1, 2, 3] and config["target_hidden_size"] == H


@pytest.mark.parametrize("kind", ["medusa", "shared"])
def test_medusas_names_and_shapes(kind: str, target: Target) -> None:
    config, tensors = to_public(drafter(kind, target))
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    blocks = {f"blocks.{k}.layers.0.weight": (H, H) for k in range(3)}
    heads = {f"lm_heads.{k}.weight": (len(VOCAB), H) for k in range(3)}
    assert shapes == {**blocks, **heads, "token_map": (len(VOCAB),)}
    assert torch.equal(tensors["token_map"], VOCAB)
    assert config["model_type"] == "medusa" and config["num_heads"] == 3
    assert config["truncated_vocab_size"] == len(VOCAB) and config["vocab_size"] == V


@pytest.mark.parametrize("kind", ["medusa", "shared", "eagle"])
@pytest.mark.parametrize("vocab", [VOCAB, torch.arange(40), None], ids=["reduced", "lowest ids", "full"])
def test_what_is_written_reads_back(
    kind: str, vocab: torch.Tensor | None, target: Target, tmp_path: Path
) -> None:
    ours = drafter(kind, target, vocab)
    write(tmp_path, ours)
    found = load_drafter(tmp_path, "cpu")
    assert (found.vocab is None) == (vocab is None)
    assert vocab is None or torch.equal(found.vocab, vocab)  # type: ignore[arg-type]
    assert same_proposals(ours, found)
    with torch.no_grad():
        next(found.model.parameters()).add_(1.0)
    assert not same_proposals(ours, found)


def test_other_writers_names_are_read(target: Target, tmp_path: Path) -> None:
    """`layers.0.*` for the layer, embeddings beside it, prefixed Medusa heads."""
    ours = drafter("eagle", target)
    config, tensors = to_public(ours)
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    renamed["embed_tokens.weight"] = torch.zeros(V, H)
    for name in ("rollout_steps", "target_hidden_size"):
        config.pop(name)
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    save_file(renamed, tmp_path / "model.safetensors")
    assert same_proposals(ours, load_drafter(tmp_path, "cpu"))
    prefixed = {
        f"medusa_heads.{name}": value for name, value in to_public(drafter("medusa", target))[1].items()
    }
    weights, vocab = from_public(prefixed)
    assert "blocks.0.layers.0.weight" in weights and torch.equal(vocab, VOCAB)  # type: ignore[arg-type]


def test_what_cannot_be_read_is_said(target: Target, tmp_path: Path) -> None:
    config, tensors = to_public(drafter("eagle", target))
    with pytest.raises(UserError, match="rising order"):
        from_public({"d2t": torch.tensor([5, 0, 0])})
    del config[LAYERS]
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="three layers"):
        load_drafter(tmp_path, "cpu")
    config[LAYERS] = [1, 2, 3]
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="do not fit"):
        load_drafter(tmp_path, "cpu")


def test_our_own_files_are_not_taken_for_others(target: Target, tmp_path: Path) -> None:
    from distill.models import save_drafter

    ours = drafter("shared", target)
    save_drafter(ours, tmp_path / "drafter")
    assert (
        len([name for name in load_file(tmp_path / "drafter" / "model.safetensors") if "lm_heads" in name])
        == 1
    )
    assert same_proposals(ours, load_drafter(tmp_path / "drafter", "cpu"))


def test_speculators_names_its_layer_its_verifier_and_k(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = drafter("eagle", target)
    config, tensors = to_speculators(ours, "org/target", ["LlamaForCausalLM"], 4)
    assert {name for name in tensors if name.startswith("layers.0.")} and "midlayer" not in str(list(tensors))
    assert torch.equal(from_public(tensors)[1], VOCAB)  # type: ignore[arg-type]
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama" and layer["num_hidden_layers"] == 1 and layer["vocab_size"] == V
    assert LAYERS not in layer and config[LAYERS] == [1, 2, 3] and config["draft_vocab_size"] == len(VOCAB)
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/target",
        "architectures": ["LlamaForCausalLM"],
    }
    (method,) = config["speculators_config"]["proposal_methods"]
    assert method["speculative_tokens"] == 4
    monkeypatch.setattr("distill.head_layouts.SPECULATORS_LAYERS", ("qwen3",))
    with pytest.raises(UserError, match="--format eagle"):
        to_speculators(ours, "org/target", [], 4)


def test_a_full_vocabulary_needs_no_map(target: Target) -> None:
    assert not {"d2t", "t2d"} & set(to_public(drafter("eagle", target, None))[1])


@pytest.mark.parametrize("kind", ["medusa", "shared"])
def test_tgis_heads_are_ours_over_all_ids(kind: str, target: Target) -> None:
    ours = drafter(kind, target)
    config, tensors = to_tgi(ours, "org/target")
    assert config == {
        "base_model_name_or_path": "org/target",
        "medusa_num_heads": 3,
        "medusa_num_layers": 1,
    }
    states = torch.cat([torch.randn(500, H), -torch.ones(1, H), torch.zeros(1, H)])
    with torch.no_grad():
        wanted = ours.model(states)
    for head in range(3):
        block = torch.nn.functional.linear(
            states, tensors[f"{head}.0.linear.weight"], tensors[f"{head}.0.linear.bias"]
        )
        logits = (states + torch.nn.functional.silu(block)) @ tensors[f"{head}.1.weight"].T
        assert logits.shape[1] == V
        assert torch.allclose(logits[:, VOCAB], wanted[:, head], atol=1e-5)
        assert torch.equal(logits[:-1].argmax(dim=1), VOCAB[wanted[:-1, head].argmax(dim=1)])
