"""Progress of long work on stderr: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

LINE_SECONDS = 20.0


class Progress:
    """Counts units (tokens, say) towards a total and shows how many, how many a second, and the time left."""

    def __init__(self, what: str, total: int, unit: str = "tokens") -> None:
        self.what = what
        self.unit = unit
        self.total = total
        self.done = 0
        self.last = time.monotonic()
        self.last_done = 0
        on_terminal = sys.stderr.isatty()
        self.bar = (
            tqdm(total=total, desc=what, unit=unit, unit_scale=True, file=sys.stderr) if on_terminal else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()
        elif error is None:
            self._line(rate=None, note="done")

    def advance(self, count: int, note: str = "") -> None:
        """`count` more are done; `note` is shown beside them."""
        self.done += count
        if self.bar is not None:
            if note:
                self.bar.set_postfix_str(note, refresh=False)
            self.bar.update(count)
            return
        now = time.monotonic()
        if now - self.last >= LINE_SECONDS:
            self._line((self.done - self.last_done) / (now - self.last), note)
            self.last, self.last_done = now, self.done

    def to(self, done: int, note: str = "") -> None:
        """`done` are done in all. The rate counts from the first call on, before which an earlier session may
        have done most of it.
        """
        if self.done == 0:
            self.done = self.last_done = done
            self.last = time.monotonic()
            if self.bar is not None:
                self.bar.initial = self.bar.n = done
        self.advance(done - self.done, note)

    def _line(self, rate: float | None, note: str) -> None:
        parts = [f"{self.what}: {self.done:,} of {self.total:,} {self.unit}"]
        if rate:
            left = max(0, self.total - self.done) / rate
            parts.append(f"{rate:,.3g} {self.unit}/s, {left / 60:.1f} minutes left")
        if note:
            parts.append(note)
        print("; ".join(parts), file=sys.stderr, flush=True)
