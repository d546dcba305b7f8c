"""Samples of the target on disk: Parquet shards of token ids with a completion mask, and their signals beside
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, overload

from data.errors import UserError
from data.files import commit_file, sha256_file
from data.signals import Signals, TopK, concatenate, read_signals, rows, write_signals

if TYPE_CHECKING:
    import torch


_SIGNALS_DIGEST = b"signals_sha256"  # in the Parquet file's metadata


@dataclass
class SampleRecord:
    """One sampled continuation of one prompt."""

    prompt_id: str
    task: str
    template: str
    split: str
    seen_template: bool
    sample_index: int
    temperature: float
    seed: int
    input_ids: list[int]
    """Prompt and completion, never re-tokenised."""
    completion_mask: list[bool]
    """True at the tokens that the target chose, its end-of-sequence token included."""
    finish_reason: str
    reencoded: bool = False
    """The engine gave text alone, so the completion's ids are our tokenizer's reading of it."""

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.completion_mask):
            raise UserError(
                f"sample {self.prompt_id}: {len(self.input_ids)} ids, {len(self.completion_mask)} mask bits."
            )
        if not any(self.completion_mask) or self.completion_mask[0]:
            raise UserError(f"sample {self.prompt_id}: it needs a prompt and at least one completion token.")

    @property
    def completion_tokens(self) -> int:
        return sum(self.completion_mask)

    @property
    def positions_read(self) -> int:
        """How many the target read to write it: the last token was not."""
        return len(self.input_ids) - 1


@dataclass
class Batch:
    """B padded records of at most T tokens, and the signals of their N completion tokens, row by row."""

    input_ids: torch.Tensor
    """int64 `[B, T]`, padded on the right."""
    attention_mask: torch.Tensor
    """int64 `[B, T]`."""
    completion_mask: torch.Tensor
    """bool `[B, T]`; the state that predicts the token at t stands at t - 1."""
    signals: Signals | TopK | None
    position_ids: torch.Tensor | None = None
    """int64 `[1, T]` where the records stand one after another in one row: each counts from 0."""

    def without_tokens(self) -> Batch:
        """The same texts with no completion token to train on."""
        import torch

        none = None if self.signals is None else rows(self.signals, slice(0, 0), slice(None))
        return replace(self, completion_mask=torch.zeros_like(self.completion_mask), signals=none)


class Samples(Sequence[SampleRecord]):
    """Records and, where the engine kept them, their signals."""

    def __init__(
        self,
        records: list[SampleRecord],
        locations: Sequence[tuple[Signals | TopK, int]] | None,
        unchecked: dict[int, Path] | None = None,
        positions: Sequence[int] | None = None,
    ) -> None:
        """`locations[i]`: the shard's signals and the first row of record i in them. `unchecked`: the shards
        whose signals were not compared with their checksum yet, by the identity of those signals.
        `positions[i]`: the first row of record i in the shard's features, where it holds some."""
        self.records = records
        self.locations = locations
        self.unchecked = {} if unchecked is None else unchecked
        self.positions = positions

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, index: int) -> SampleRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampleRecord]: ...
    def __getitem__(self, index: int | slice) -> SampleRecord | list[SampleRecord]:
        return self.records[index]

    def __iter__(self) -> Iterator[SampleRecord]:
        return iter(self.records)

    @property
    def has_signals(self) -> bool:
        """Do they carry the target's hidden states?"""
        return self.locations is not None and all(isinstance(one, Signals) for one, _ in self.locations)

    def has_exact_signals(self, dtype: torch.dtype) -> bool:
        """Do they carry the hidden states of a target of `dtype` as it computes them, not rounded?"""
        return self.has_signals and self.state_dtype == dtype

    @property
    def has_features(self) -> bool:
        """Do they carry the states of the layers that a head draws on?"""
        return self.has_signals and all("features" in one.tensors() for one, _ in self.locations or ())

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype that hidden states are stored in."""
        assert self.locations is not None and isinstance(self.locations[0][0], Signals)
        return self.locations[0][0].hidden.dtype

    @property
    def has_top_k(self) -> bool:
        """Do they carry the target's most likely ids?"""
        return self.locations is not None and all(isinstance(one, TopK) for one, _ in self.locations)

    @property
    def completion_tokens(self) -> int:
        return sum(record.completion_tokens for record in self.records)

    def signals(self, index: int) -> Signals | TopK:
        """Signals of record `index`: n rows for its n completion tokens. `UserError` where their file has
        changed since it was written."""
        assert self.locations is not None, "these samples carry no signals"
        shard, first = self.locations[index]
        if id(shard) in self.unchecked:
            path = self.unchecked.pop(id(shard))
            if fault := _signals_fault(path):
                raise UserError(f"{path.with_name(fault)}: delete it and its shard, and sample again.")
        record, begin = self.records[index], self.positions[index] if self.positions else 0
        read = slice(begin, begin + record.positions_read)
        return rows(shard, slice(first, first + record.completion_tokens), read)

    def where(
        self, *, split: str | None = None, temperature: float | None = None, seen_template: bool | None = None
    ) -> Samples:
        """The samples of a split, a temperature, of seen or unseen templates."""
        kept = [
            i
            for i, record in enumerate(self.records)
            if (split is None or record.split == split)
            and (temperature is None or record.temperature == temperature)
            and (seen_template is None or record.seen_template == seen_template)
        ]
        return self.pick(kept)

    def pick(self, indices: Sequence[int]) -> Samples:
        """The samples at `indices`, in that order."""
        locations = None if self.locations is None else [self.locations[i] for i in indices]
        positions = None if self.positions is None else [self.positions[i] for i in indices]
        return Samples([self.records[i] for i in indices], locations, self.unchecked, positions)


def shard_path(directory: Path, index: int) -> Path:
    return directory / f"samples-{index:05d}.parquet"


def write_shard(
    directory: Path,
    index: int,
    records: list[SampleRecord],
    signals: Sequence[Signals | TopK] | None,
) -> None:
    """Write a shard's records, and first their signals: the Parquet file's presence says that the shard is
    whole.
    """
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    path = shard_path(directory, index)
    about = {}
    if signals is not None:
        write_signals(signals_path(path), signals)
        about[_SIGNALS_DIGEST] = sha256_file(signals_path(path)).encode()
    temporary = path.with_suffix(".tmp")
    rows = [asdict(record) for record in records]
    if not any(record.reencoded for record in records):  # the column is the mark: absent where all is exact
        for row in rows:
            del row["reencoded"]
    table = arrow.Table.from_pylist(rows).replace_schema_metadata(about)
    parquet.write_table(table, temporary, write_page_checksum=True)
    commit_file(temporary, path)


def shard_fault(path: Path) -> str:
    """What is wrong with the shard at `path`, by its checksums and that of its signals; empty where nothing
    is.
    """
    try:
        read_records(path)
    except UserError as error:
        return str(error)
    return _signals_fault(path)


def _signals_fault(path: Path) -> str:
    import pyarrow.parquet as parquet

    expected = (parquet.read_schema(path).metadata or {}).get(_SIGNALS_DIGEST)
    signals = signals_path(path)
    if expected is None:  # without signals, or of before there were digests
        return ""
    if not signals.exists():
        return f"{signals.name} is missing"
    if sha256_file(signals).encode() != expected:
        return f"{signals.name} has changed since it was written"
    return ""


def signals_path(shard: Path) -> Path:
    return shard.with_name(shard.name.replace("samples", "signals")).with_suffix(".safetensors")


def read_records(path: Path) -> list[SampleRecord]:
    """The records of one shard; UserError naming the file where it cannot be read."""
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(path, page_checksum_verification=True)
        return [SampleRecord(**row) for row in table.to_pylist()]
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); delete it and sample again.") from error


def open_samples(directory: Path) -> Samples:
    """All shards of a sampling stage, in order."""
    records: list[SampleRecord] = []
    locations: list[tuple[Signals | TopK, int]] = []
    positions: list[int] = []
    unchecked: dict[int, Path] = {}
    for path in sorted(directory.glob("samples-*.parquet")):
        shard = read_records(path)
        records += shard
        if signals_path(path).exists():
            signals, first, begin = read_signals(signals_path(path)), 0, 0
            unchecked[id(signals)] = path
            for record in shard:
                locations.append((signals, first))
                positions.append(begin)
                first += record.completion_tokens
                begin += record.positions_read
            if first != len(signals):
                raise UserError(
                    f"{signals_path(path)} holds {len(signals)} rows, its shard has {first}: sample again."
                )
    if not records:
        raise UserError(f"{directory} holds no samples; run the sampling stage first.")
    whole = len(locations) == len(records)
    return Samples(records, locations if whole else None, unchecked, positions if whole else None)


def collate(samples: Samples, indices: Sequence[int], pad_id: int) -> Batch:
    """Records `indices` as one batch, padded on the right with `pad_id` (masked, also where it is EOS)."""
    import torch

    records = [samples[i] for i in indices]
    width = max(len(record.input_ids) for record in records)
    input_ids = torch.full((len(records), width), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(len(records), width, dtype=torch.int64)
    completion_mask = torch.zeros(len(records), width, dtype=torch.bool)
    for row, record in enumerate(records):
        length = len(record.input_ids)
        input_ids[row, :length] = torch.tensor(record.input_ids)
        attention_mask[row, :length] = 1
        completion_mask[row, :length] = torch.tensor(record.completion_mask)
    signals = _signals(samples, indices)
    return Batch(input_ids, attention_mask, completion_mask, signals)


def pack(samples: Samples, indices: Sequence[int], pad_id: int) -> Batch:
    """Records `indices` as one batch of one row, one after another without padding.

    The positions begin at 0 with each, by which transformers keeps their attention apart. `pad_id` is not
    needed: the arguments are `collate`'s.
    """
    import torch

    records = [samples[i] for i in indices]
    ids = [id_ for record in records for id_ in record.input_ids]
    mask = [bit for record in records for bit in record.completion_mask]
    positions = [place for record in records for place in range(len(record.input_ids))]
    signals = _signals(samples, indices)
    return Batch(
        torch.tensor([ids]),
        torch.ones(1, len(ids), dtype=torch.int64),
        torch.tensor([mask]),
        signals,
        torch.tensor([positions]),
    )


def _signals(samples: Samples, indices: Sequence[int]) -> Signals | TopK | None:
    if samples.locations is None:
        return None
    return concatenate([samples.signals(i) for i in indices])
