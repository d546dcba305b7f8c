"""Build the drafter that training starts from.

Medusa's and EAGLE's heads (`draft.kind`) start from the target's own weights. For a model there are three
starts, by `draft.init.from`:

- `target`: the chosen layers of the target, its embeddings, final norm and head rows. Fast to draw up and
  accepts nothing before training.
- a hub id or a path: a family member with the target's tokenizer, whole or with chosen layers.
- `shipped:NAME` and `models:/NAME@ALIAS`: a drafter that comes with the project (`distill.compact`), or a
  registered candidate; already distilled, with the draft vocabulary it was trained on.

The draft vocabulary (`draft.vocab_size`): the most frequent ids of the samples; what room is left goes to ids
that the start covers already. Each row is copied from the start's own head where it has that id, and made
of the target's row where it has not (same hidden size only).

Every drafter that is built here has an untied head, so that its input embedding can stay frozen: a drafter
pruned from the target shares the target's embedding, in memory and in an export. Only a family member taken
whole with a tied head stays tied, and its embedding is trained with its head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from data.errors import UserError
from distill.compact import COMPACT, read_compact
from distill.model_files import read_config, read_tokenizer
from distill.models import Target, cast_parameters, check_head, load_drafter, load_model
from distill.prune import check_prunable, cut
from distill.resolve import resolve_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from evaluation.decoder.drafters import DraftModel
    from evaluation.decoder.heads import HeadModel

_REGISTERED_PREFIX = "models:/"


class InitConfig(BaseModel):
    """Where the drafter's first weights come from."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    from_: str = Field(default="target", alias="from")
    """`target`, a hub id or path of a family member, `shipped:NAME`, or `models:/NAME@ALIAS`."""
    layers: list[int] | None = None
    """Which layers to keep, in order, counted from 0. For `target`, this or `layer_count`; all where both are
    left out otherwise."""
    layer_count: int | None = Field(default=None, gt=0)
    """How many layers to keep, chosen by `choose_by`."""
    choose_by: Literal["importance", "even"] = "importance"
    """`importance`: those that change the residual stream most on texts of the select split; `even`: evenly
    spaced, first and last among them."""
    width: int | None = Field(default=None, gt=0)
    """Hidden size, where narrower than the source: the most active dimensions and neurons are kept."""

    @property
    def cuts(self) -> bool:
        """Is the drafter cut out of its source, so that it accepts nothing before it is trained?"""
        return any(option is not None for option in (self.layers, self.layer_count, self.width))


class DraftConfig(BaseModel):
    """The drafter's kind, start and vocabulary."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["model", "medusa", "eagle"] = "model"
    """A causal LM of its own, or heads on the target: Medusa's or EAGLE-3's."""
    init: InitConfig = InitConfig()
    vocab_size: int | None = Field(default=None, gt=0)
    """Ids that the draft head covers; the full vocabulary where left out."""
    revision: str | None = None
    """Hub revision of the family member named by `init.from`."""
    heads: int | None = Field(default=None, gt=0, le=16)
    """`medusa` only: how many tokens it drafts, one head each."""
    shared_head: bool = False
    """`medusa` only: one output head for all of them, over residual blocks of their own."""
    rollout_steps: int | None = Field(default=None, gt=0, le=16)
    """`eagle` only: for how many drafted tokens training follows its own output (training-time test)."""

    def identity(self) -> dict[str, Any]:
        """What decides the drafter, for a stage's key: options that are not in use are no part of it."""
        init = self.init
        unused = {name for name in ("layer_count", "width") if getattr(init, name) is None}
        if init.layer_count is None:
            unused.add("choose_by")
        others: dict[str, Any] = {"heads": True, "shared_head": True, "rollout_steps": True}
        if self.kind == "medusa":
            others = {"rollout_steps": True}
        elif self.kind == "eagle":
            del others["rollout_steps"]
        return self.model_dump(mode="json", by_alias=True, exclude={"init": unused, **others})


def build_drafter(
    config: DraftConfig,
    target: Target,
    token_counts: Tensor,
    cache_dir: Path,
    resolve_candidate: Callable[[str], Path],
    texts: Sequence[Sequence[int]] = (),
) -> DraftModel:
    """The drafter to train, on the target's device and in the target's dtype.

    Args: `token_counts` int64 [V], the target's own tokens in the training samples (for the draft
    vocabulary); `resolve_candidate` turns `models:/NAME@ALIAS` into a local directory; `texts`, token ids of
    a few samples, are what importance is measured on. Raises `UserError` where the recipe's choice does not
    fit the target.
    """
    from evaluation.decoder.drafters import DraftModel

    if config.kind != "model":
        return _build_head(config, target, token_counts)
    source = _load_source(config, target, cache_dir, resolve_candidate)
    vocab = _draft_vocab(config, target, source, token_counts)
    init = config.init
    if not init.cuts and _same_vocab(vocab, source.vocab):
        model = source.model
    else:
        check_prunable(source.model, init.from_)
        head = source.model.get_output_embeddings().weight
        rows = head if _same_vocab(vocab, source.vocab) else _head_rows(vocab, source, target)
        model = cut(source.model, init, rows, texts)
    model.generation_config = copy.deepcopy(target.model.generation_config)
    cast_parameters(model, target.model.dtype)
    return DraftModel(model.to(target.model.device).eval().requires_grad_(True), vocab)


def _build_head(config: DraftConfig, target: Target, token_counts: Tensor) -> DraftModel:
    """Medusa's or EAGLE's modules, begun with the target's weights; they own no embeddings."""
    from evaluation.decoder.drafters import DraftModel
    from evaluation.head import head_of

    if not head_of(target.model).plain:
        raise UserError(
            f"draft.kind: {target.name} scales, caps or shifts its logits, which {config.kind} heads have no "
            "part for: choose kind model."
        )
    if config.kind == "eagle":
        check_prunable(target.model, target.name)
    vocab = _draft_vocab(config, target, DraftModel(target.model), token_counts)
    return DraftModel(start_head(config, target.model, vocab), vocab)


def start_head(config: DraftConfig, target: PreTrainedModel, vocab: Tensor | None) -> HeadModel:
    """The modules of a Medusa or EAGLE drafter of `target`, on its device and in its dtype."""
    from evaluation.decoder.eagle import start_eagle
    from evaluation.decoder.medusa import start_medusa

    model: HeadModel
    if config.kind == "medusa":
        assert config.heads is not None
        model = start_medusa(target, vocab, config.heads, shared_head=config.shared_head)
    else:
        assert config.rollout_steps is not None
        model = start_eagle(target, vocab, config.rollout_steps)
    model.config.dtype = target.dtype
    cast_parameters(model, target.dtype)
    head: HeadModel = model.to(target.device).eval().requires_grad_(True)
    return head


def _load_source(
    config: DraftConfig, target: Target, cache_dir: Path, resolve_candidate: Callable[[str], Path]
) -> DraftModel:
    from evaluation.decoder.drafters import DraftModel

    name = config.init.from_
    if name == "target":
        if config.init.layers is None and config.init.layer_count is None:
            raise UserError("draft.init.layers is missing: name the target's layers that the drafter keeps.")
        if not target.quantized:
            return DraftModel(target.model, None)
        assert target.folder is not None
        return DraftModel(load_model(target.folder, target.model.dtype).to(target.model.device), None)
    if name.startswith(_REGISTERED_PREFIX):
        source = load_drafter(resolve_candidate(name), target.model.device)
        _check_same_vocabulary_size(source.model, name, target, "draft.init.from")
        return source
    folder = resolve_model(name, config.revision, cache_dir, "draft.init.from")
    return read_drafter(folder, name, target, "draft.init.from")


def read_drafter(path: Path, name: str, target: Target, what: str) -> DraftModel:
    """The drafter, or the model of the target's family, in a local directory.

    `name` and `what`, the setting that gave it, stand in messages. Raises `UserError` where it is not the
    target's.
    """

    from evaluation.decoder.drafters import DraftModel
    from evaluation.decoder.kinds import kind_of

    heads = kind_of(read_config(path)) != "model"
    if (path / COMPACT).is_file():
        source = read_compact(path, target)
    elif heads or (path / "draft_vocab.json").is_file():
        source = load_drafter(path, target.model.device)
    else:
        _check_same_tokenizer(path, name, target, what)
        source = DraftModel(load_model(path, target.model.dtype).to(target.model.device), None)
        check_head(source.model, name)
    _check_same_vocabulary_size(source.model, name, target, what)
    if heads and source.model.config.hidden_size != target.model.config.hidden_size:
        raise UserError(
            f"{name} holds heads for a target of width {source.model.config.hidden_size}, and this one has "
            f"{target.model.config.hidden_size}: heads draft for the target that they were trained on."
        )
    return source


def _check_same_tokenizer(path: Path, name: str, target: Target, what: str) -> None:
    theirs = read_tokenizer(path).get_vocab()
    ours = target.tokenizer.get_vocab()
    differing = [token for token in ours if theirs.get(token) != ours[token]]
    if differing or len(theirs) != len(ours):
        example = f", for example {differing[0]!r}" if differing else ""
        raise UserError(
            f"{what}: the tokenizer of {name} is not the target's "
            f"({max(len(differing), abs(len(theirs) - len(ours)))} tokens differ{example}); "
            "choose a model of the target's family."
        )


def _check_same_vocabulary_size(model: PreTrainedModel, name: str, target: Target, what: str) -> None:
    theirs, ours = model.config.vocab_size, target.model.config.vocab_size
    if theirs != ours:
        raise UserError(
            f"{what}: {name} embeds {theirs} ids and the target {ours}; "
            "the embeddings must cover the same ids."
        )


def _draft_vocab(
    config: DraftConfig, target: Target, source: DraftModel, token_counts: Tensor
) -> Tensor | None:
    """The target ids of the drafter's head, `None` for all of them."""
    from distill.vocab import choose_draft_vocab

    if config.vocab_size is None:
        return None
    own_rows_only = source.model.config.hidden_size != target.model.config.hidden_size
    if source.vocab is not None and len(source.vocab) == config.vocab_size and own_rows_only:
        return source.vocab
    always = {*target.eos_ids, target.pad_id, *target.tokenizer.all_special_ids}
    counts = 2 * token_counts.cpu()  # so that an id of the start outranks only those that the samples lack
    if source.vocab is not None:
        counts[source.vocab.cpu()] += 1
    vocab = choose_draft_vocab(counts, config.vocab_size, always)
    return None if len(vocab) == len(token_counts) else vocab.to(target.model.device)


def _same_vocab(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and bool((one == other.to(one.device)).all())


def _head_rows(vocab: Tensor | None, source: DraftModel, target: Target) -> Tensor:
    """Head rows for `vocab`: the source's own where it has them; elsewhere the target's, moved as
    distillation moved the source's.
    """
    import torch

    own = source.model.get_output_embeddings().weight.detach()
    if source.vocab is None:
        return own if vocab is None else own[vocab]
    theirs = target.model.get_output_embeddings().weight.detach()
    if theirs.shape[1] != own.shape[1]:
        raise UserError(
            f"draft.vocab_size: the candidate's own draft vocabulary has {len(own)} ids, and rows for others "
            f"cannot come from the target (hidden size {theirs.shape[1]}, not {own.shape[1]}); "
            f"set draft.vocab_size to {len(own)}."
        )
    # Distillation moved the rows away from the target's. Rows that were not there are moved likewise, by the
    # linear map that fits the others: as they are, they would win over rows that were trained (docs/LOG.md).
    anchors = theirs[source.vocab].cpu().double()
    moved = torch.linalg.lstsq(anchors, own.cpu().double() - anchors, driver="gelsy").solution
    wanted = torch.arange(len(theirs), device=own.device) if vocab is None else vocab
    at = torch.searchsorted(source.vocab, wanted).clamp(max=len(source.vocab) - 1)
    known = source.vocab[at] == wanted
    rows = theirs[wanted].cpu().double()
    rows = (rows + rows @ moved).to(own)
    rows[known] = own[at[known]]
    return rows
