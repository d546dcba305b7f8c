"""How many tokens to draft in a round, by how many rows share it.

The more rows share a target step, the less a wider one is free, so the best K falls with the batch, to 0
where drafting loses. A batch that empties drafts more towards its end.
"""

from __future__ import annotations

from collections.abc import Mapping

from data.errors import UserError


class Schedule:
    """K by the number of active rows. It says how many tokens are drafted, never which: the output stays the
    target's.
    """

    def __init__(self, by_rows: Mapping[int, int]) -> None:
        """`{1: 8, 4: 3, 16: 0}`: 8 drafts for one row, 3 for up to four, none for up to 16 and beyond."""
        if not by_rows or min(by_rows) < 1 or min(by_rows.values()) < 0:
            raise UserError(
                f"a schedule of drafts is {dict(by_rows)}; give drafts, 0 or more, by rows, 1 or more."
            )
        self.by_rows = sorted(by_rows.items())

    @property
    def most(self) -> int:
        """The largest K."""
        return max(count for _, count in self.by_rows)

    def count(self, rows: int) -> int:
        """K for so many active rows: that of the next larger size named, or of the largest."""
        return next((count for size, count in self.by_rows if size >= rows), self.by_rows[-1][1])
