"""What preflight finds, and how it is told."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from data.errors import UserError


@dataclass(frozen=True)
class Finding:
    """One thing that preflight looked at: fine, worth knowing, or in the way."""

    level: Literal["ok", "note", "blocks"]
    what: str
    text: str

    def __str__(self) -> str:
        mark = {"ok": "ok     ", "note": "note   ", "blocks": "MISSING"}[self.level]
        return f"  {mark} {self.what}: {self.text}"


@dataclass
class Findings:
    """All that was looked at for one recipe."""

    recipe: str
    items: list[Finding] = field(default_factory=list)

    @property
    def blocked(self) -> bool:
        """True where something is missing without which the run cannot finish."""
        return any(item.level == "blocks" for item in self.items)

    def text(self) -> str:
        """The findings as the user reads them."""
        verdict = "cannot run here" if self.blocked else "can run here"
        return "\n".join([f"recipe {self.recipe} {verdict}", *(str(item) for item in self.items)])

    def raise_if_blocked(self) -> None:
        """Raise `UserError` with everything that is missing."""
        if self.blocked:
            missing = [str(item) for item in self.items if item.level == "blocks"]
            raise UserError(
                "\n".join([f"recipe {self.recipe} cannot run here; nothing was started", *missing])
            )

    def to_json(self) -> dict[str, Any]:
        """The findings as plain data."""
        return {
            "recipe": self.recipe,
            "ok": not self.blocked,
            "findings": [asdict(item) for item in self.items],
        }
