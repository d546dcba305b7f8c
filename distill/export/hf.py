"""The drafter as a Hugging Face directory that transformers, vLLM, SGLang and the llama.cpp converter load.

A reduced head is expanded to the target's full vocabulary, because those servers demand equal vocabularies
and know no token map for a plain drafter. Which row a missing id gets decides whether it is ever drafted:
see `fill_row`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from data.errors import UserError
from data.files import write_json
from distill.export.card import model_card
from distill.export.directory import check_out_dir, write_export
from distill.export.pair import (
    check_pair,
    read_side,
    refused_by,
    tensor_parallel_sizes,
    vocabulary,
    vocabulary_hash,
)
from distill.export.serve import serve_files
from distill.identity import model_form
from distill.models import load_drafter, without_bars
from distill.redact import redacted
from evaluation.decoder.drafters import DraftModel
from evaluation.head import head_of

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
TOKEN_MAP = "sglang-token-map.pt"
_SEQUENCES, _LENGTH = 32, 256  # calibration: at most this many sequences of this many tokens


@dataclass(frozen=True)
class Expansion:
    """How the head was expanded, and what that costs, over the calibration positions."""

    rows: int
    """Rows that the drafter really has."""
    filled: int
    """Target ids without a row of their own."""
    positions: int
    greedy_missing: int
    """Positions at which a missing id has the largest logit: 0 by construction, counted all the same."""
    missing_mass: float
    """Mean draft probability of all missing ids together, at temperature 1: lost when drafting by sampling.
    """


@dataclass(frozen=True)
class Built:
    """The Hugging Face directory of a drafter, before cards and command lines."""

    expansion: dict[str, Any]
    dtype: str
    """Of the weights, such as "float32"."""
    vocab: list[int] | None
    """The ids that the drafter really has, where its head was reduced."""


def export_hf(
    drafter_dir: Path,
    target: Path,
    out_dir: Path,
    *,
    facts: Mapping[str, Any],
    calibration: Sequence[Sequence[int]] = (),
    target_gguf: Path | None = None,
    force: bool = False,
) -> Path:
    """Write the drafter in `drafter_dir` (made by `save_drafter`) for servers of the target in directory
    `target`.

    `facts` says where it comes from; every key but the first two may be missing: `target_model` (hub id or
    path that servers load), `num_speculative_tokens` (tuned K), `target_revision`, `license`, `recipe`,
    `candidate`, `run_id`, `serving` (the recipe's block) and `evaluation` (evaluation.json). `calibration`
    are token id sequences of the workload; random ids stand in where there are none. `target_gguf` is the
    GGUF that llama.cpp serves the target from. The directory appears whole or not at all. Raises `UserError`
    as `check_out_dir` does, for a target without tokenizer files and for a drafter that does not belong to
    it.
    """
    out_dir = Path(out_dir).resolve()
    check_out_dir(out_dir, force)
    notes: dict[str, Any] = {}

    def fill(folder: Path) -> None:
        built = build_hf(drafter_dir, target, folder, facts, calibration)
        checks = check_pair(target, folder, out_dir)
        notes.update(
            expansion=built.expansion,
            vocabulary=vocabulary_hash(vocabulary(target)),
            checks=[asdict(check) for check in checks],
        )
        files = serve_files(
            facts,
            target=servable(facts, target),
            dtype=built.dtype,
            target_gguf=None if target_gguf is None else str(target_gguf.resolve()),
            refused=refused_by(checks) | unknown_tokenizer(facts, target),
            tensor_parallel=tensor_parallel_sizes(read_side(target), read_side(folder)),
            token_map=None if built.vocab is None else TOKEN_MAP,
        )
        write_texts(folder, {"README.md": model_card(redacted(dict(facts)), built.expansion, out_dir.name)})
        write_texts(folder / "serve", files)
        if built.vocab is not None:
            torch.save(built.vocab, folder / "serve" / TOKEN_MAP)

    write_export(out_dir, "hf", facts=facts, notes=notes, fill=fill, force=force)
    return out_dir


def build_hf(
    drafter_dir: Path,
    target: Path,
    folder: Path,
    facts: Mapping[str, Any],
    calibration: Sequence[Sequence[int]] = (),
) -> Built:
    """Fill `folder` with weights, configs and tokenizer as servers of `target` demand them."""
    target_config = _target_config(target)
    tokenizer_files = [Path(target) / name for name in TOKENIZER_FILES if (Path(target) / name).is_file()]
    if not {file.name for file in tokenizer_files} & {"tokenizer.json", "tokenizer.model", "vocab.json"}:
        raise UserError(
            f"The target in {target} has no tokenizer files, without which no server loads its drafter."
        )
    drafter = load_drafter(drafter_dir, "cpu")
    vocab = None if drafter.vocab is None else drafter.vocab.tolist()
    expansion = expand_vocabulary(
        drafter, int(target_config["vocab_size"]), target_config["eos"], calibration
    )
    _adopt(drafter.model, target_config)
    generation = {
        **{f"{name}_token_id": target_config[name] for name in ("bos", "eos", "pad")},
        "num_assistant_tokens": int(facts["num_speculative_tokens"]),
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    with without_bars():
        drafter.model.save_pretrained(folder)
    write_json(folder / "generation_config.json", generation)
    for file in tokenizer_files:
        shutil.copyfile(file, folder / file.name)
    return Built(asdict(expansion), str(drafter.model.dtype).removeprefix("torch."), vocab)


def unknown_tokenizer(facts: Mapping[str, Any], target: Path) -> dict[str, str]:
    """Why llama.cpp cannot read the target's tokenizer, under "llama.cpp"; empty where it can, and where the
    package that knows is not installed.

    Its converter knows byte-pair tokenizers by what they make of one test text; a random target's is none of
    them.
    """
    reason = "its converter does not know this tokenizer."
    if model_form(str(facts["target_model"])) == "random":
        return {"llama.cpp": reason}
    if find_spec("conversion") is None or (target / "tokenizer.model").is_file():
        return {}
    from conversion.base import TextModel
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    logging.getLogger("hf-to-gguf").setLevel(logging.ERROR)  # it warns at length before it raises
    try:
        TextModel.get_vocab_base_pre(None, tokenizer)
    except NotImplementedError:
        return {"llama.cpp": reason}
    return {}


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write each text under its name in `folder`, which is made where missing."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")


def expand_vocabulary(
    drafter: DraftModel, vocab_size: int, eos: Any, calibration: Sequence[Sequence[int]]
) -> Expansion:
    """Give the drafter, in place, `vocab_size` embeddings and head rows, one for each id of the target.

    Rows that are missing (a reduced head, a family member with fewer padding rows) are filled by
    `fill_row`; rows beyond the target's last id are cut. Afterwards `drafter.vocab` is None.
    """
    model, vocab = drafter.model, drafter.vocab
    embeddings, head = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    tied = vocab is None and head.data_ptr() == embeddings.data_ptr()
    ids = torch.arange(len(head)) if vocab is None else vocab
    head, ids = head[ids < vocab_size], ids[ids < vocab_size]
    missing = vocab_size - len(ids)
    if missing == 0 and len(embeddings) == vocab_size:
        drafter.vocab = None
        return Expansion(rows=len(ids), filled=0, positions=0, greedy_missing=0, missing_mass=0.0)
    states = calibration_states(drafter, calibration or [ids[:_LENGTH].tolist()])
    eos_ids = {int(token) for token in (eos if isinstance(eos, list) else [eos]) if token is not None}
    row = fill_row(head, states, torch.tensor([int(token) in eos_ids for token in ids]))
    full = row.repeat(vocab_size, 1)
    full[ids] = head
    new_embeddings = full if tied else _resized(embeddings, vocab_size)
    _set_rows(model, new_embeddings, full, tied)
    drafter.vocab = None
    return _measured(head, row, states, missing, head_of(model).shaped)


def fill_row(head: torch.Tensor, states: torch.Tensor, excluded: torch.Tensor) -> torch.Tensor:
    """The head row `[H]` for ids without one, from the head `[Vd, H]` and final hidden states `[N, H]`.

    It is the mean of the two rows with the least probability over the states (`excluded`, bool `[Vd]`, are
    not considered). The logit of a mean of two rows is the mean of their logits, so for *every* hidden
    state it is at most the larger of the two, hence at most the largest logit, and equal to it only where
    both rows tie for first place: a filled id is never drafted greedily, however a server breaks ties. A
    zero row gives no such promise (its logit 0 beats negative logits), nor does a copy of one row (it ties
    whenever that row leads, and rounding may favour it). Rounding the mean to 16 bits keeps the promise up
    to that rounding. With sampling at temperature > 0 the filled ids together still take a little
    probability; choosing the least likely rows keeps it small (it is measured).
    """
    total = torch.zeros(len(head))
    for chunk in states.split(512):
        total += (chunk.float() @ head.float().T).softmax(dim=-1).sum(dim=0)
    least = total.masked_fill(excluded, torch.inf).topk(min(2, len(head)), largest=False).indices
    return head[least].float().mean(dim=0).to(head.dtype)


@torch.inference_mode()
def calibration_states(drafter: DraftModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Final hidden states `[N, H]` of the drafter over the beginnings of the first token id sequences."""
    chosen = [list(sequence[:_LENGTH]) for sequence in sequences[:_SEQUENCES] if len(sequence)]
    return torch.cat([drafter.model.base_model(torch.tensor([ids])).last_hidden_state[0] for ids in chosen])


def _measured(
    head: torch.Tensor,
    row: torch.Tensor,
    states: torch.Tensor,
    missing: int,
    shaped: Callable[[torch.Tensor], torch.Tensor],
) -> Expansion:
    greedy_missing, mass = 0, 0.0
    for chunk in states.split(512):
        kept, filled = shaped(chunk.float() @ head.float().T), shaped(chunk.float() @ row.float())
        greedy_missing += int((filled > kept.max(dim=-1).values).sum()) if missing else 0
        odds = missing * (filled - kept.logsumexp(dim=-1)).exp()  # all missing ids against all others
        mass += float((odds / (1 + odds)).sum())
    return Expansion(len(head), missing, len(states), greedy_missing, mass / len(states))


def _resized(embeddings: torch.Tensor, rows: int) -> torch.Tensor:
    # A padding id is never read, so its embedding does not matter.
    new = torch.zeros(rows, embeddings.shape[1], dtype=embeddings.dtype)
    kept = min(rows, len(embeddings))
    new[:kept] = embeddings[:kept]
    return new


def _set_rows(model: Any, embeddings: torch.Tensor, head: torch.Tensor, tied: bool) -> None:
    embedding = model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(embeddings, requires_grad=False)
    embedding.num_embeddings = len(embeddings)
    output = torch.nn.Linear(head.shape[1], len(head), bias=False, device="meta")
    output.weight = embedding.weight if tied else torch.nn.Parameter(head, requires_grad=False)
    model.set_output_embeddings(output)
    model.config.get_text_config().tie_word_embeddings = tied


def _adopt(model: Any, target: Mapping[str, Any]) -> None:
    """Make the drafter's config say what servers compare with the target's."""
    config = model.config
    config.vocab_size = target["vocab_size"]
    for name in ("bos", "eos", "pad"):
        setattr(config, f"{name}_token_id", target[name])
    config.max_position_embeddings = max(
        int(getattr(config, "max_position_embeddings", 0) or 0), target["max_position_embeddings"]
    )
    config.dtype = model.dtype
    config.architectures = [type(model).__name__]
    config._name_or_path = ""


def _target_config(target: Path) -> dict[str, Any]:
    """vocab_size, max_position_embeddings and the ids bos, eos, pad of the target's directory."""
    path = Path(target) / "config.json"
    if not path.is_file():
        raise UserError(f"There is no target in {target}: config.json is missing.")
    whole = json.loads(path.read_text("utf-8"))
    config = {**whole, **whole.get("text_config", {})}
    generation_path = Path(target) / "generation_config.json"
    generation = json.loads(generation_path.read_text("utf-8")) if generation_path.is_file() else {}
    ids = {
        name: generation.get(f"{name}_token_id", config.get(f"{name}_token_id"))
        for name in ("bos", "eos", "pad")
    }
    return {
        "vocab_size": int(config["vocab_size"]),
        "max_position_embeddings": int(config.get("max_position_embeddings") or 0),
        **ids,
    }


def servable(facts: Mapping[str, Any], target_dir: Path) -> str:
    """The name under which a server finds the target: its hub id, or (a path, a GGUF in a package) its
    directory.
    """
    model = str(facts["target_model"])
    is_hub_id = model_form(model) == "hub"
    return model if is_hub_id else str(target_dir.resolve())
