"""Near copies among prompts: texts that say the same but for a word or a comma.

Two texts are near copies where at least `THRESHOLD` of what either has is in both: the Jaccard similarity of
their sets of `SHINGLE` consecutive characters, letters and digits alone, case ignored. What more than a tenth
of all texts share (an instruction that each of them begins with, the commonest words) is form, not content,
and does not count. MinHash (Broder 1997, "On the resemblance and containment of documents") only finds the
pairs worth comparing; the similarity that decides is exact. It misses a pair at the threshold with
probability 2e-4, and less above it; its numbers are fixed, so that the same texts always give the same pairs.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

THRESHOLD = 0.8
SHINGLE = 5
FORM_SHARE, FORM_AT_LEAST = 0.1, 20
"""Form is what more than this share of the texts have, and more than so many of them."""
_BLOCK = 1 << 16
_BANDS, _ROWS = 16, 4  # a pair of similarity s shares a band with probability 1 - (1 - s**4)**16


def normalise(text: str) -> str:
    """Letters and digits in lower case, anything else between them as one blank."""
    return re.sub(r"[\W_]+", " ", text.casefold()).strip()


def near_pairs(texts: Sequence[str], compared: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Pairs (i, j), i < j, of near copies, ordered by j; at least one of each pair is `compared`."""
    contents = _contents([_shingles(normalise(text)) for text in texts])
    # One index of all texts for those that are compared with all, one of those for the others.
    everything: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    chosen: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for j, content in enumerate(contents):
        if not len(content):
            continue
        bands = _bands(content)
        index = everything if compared[j] else chosen
        for i in sorted({i for band in bands for i in index.get(band, ())}):
            if similarity(contents[i], content) >= THRESHOLD:
                yield i, j
        for band in bands:
            everything[band].append(j)
            if compared[j]:
                chosen[band].append(j)


def similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Jaccard similarity of two sets, given as ascending arrays without repeats."""
    import numpy as np

    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (len(first) + len(second) - common)


def _shingles(text: str) -> np.ndarray:
    """uint64 hashes of all runs of SHINGLE characters, ascending, each once; a shorter text is one run."""
    import numpy as np

    codes = np.frombuffer(text.ljust(SHINGLE).encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(codes, SHINGLE)
    powers = np.array([pow(_odd("power"), k, 2**64) for k in range(SHINGLE)], dtype=np.uint64)
    return np.unique((windows * powers).sum(axis=1, dtype=np.uint64))


def _contents(shingles: list[np.ndarray]) -> list[np.ndarray]:
    """Each text's shingles without those of the form."""
    import numpy as np

    if not shingles:
        return []
    found, counts = np.unique(np.concatenate(shingles), return_counts=True)
    form = found[counts > max(FORM_AT_LEAST, FORM_SHARE * len(shingles))]
    return [np.setdiff1d(each, form, assume_unique=True) for each in shingles] if len(form) else shingles


def _bands(content: np.ndarray) -> list[tuple[int, bytes]]:
    import numpy as np

    factors = np.array([_odd(str(k)) for k in range(_BANDS * _ROWS)], dtype=np.uint64)
    parts = np.split(content, range(_BLOCK, len(content), _BLOCK))  # a long text must not cost gigabytes
    least = np.min([((part[:, None] * factors) >> np.uint64(32)).min(axis=0) for part in parts], axis=0)
    return [(band, row.tobytes()) for band, row in enumerate(least.reshape(_BANDS, _ROWS))]


def _odd(name: str) -> int:
    """A fixed odd number of 64 bits."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) | 1
