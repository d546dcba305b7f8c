"""What a command did: its stages, how each ended, and what they wrote."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill.recipe import Recipe
from distill.stages import Outcome


@dataclass
class Result:
    """What a command did, stage by stage."""

    recipe: Recipe
    prepare_seconds: float
    """Finding target and prompts; the first time, converting or downloading the target."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def read(self, stage: str, name: str) -> dict[str, Any] | None:
        """A JSON file of a stage; None where the stage wrote none or was not part of the command."""
        path = self.outcomes[stage].stage.directory / name if stage in self.outcomes else None
        return read_json(path) if path is not None and path.exists() else None

    def to_json(self) -> dict[str, Any]:
        """The result as plain data: each stage's folder, time and state, then measures and decision."""
        stages = [
            {
                "name": name,
                "key": outcome.stage.key,
                "directory": str(outcome.stage.directory),
                "seconds": outcome.seconds,
                "skipped": outcome.skipped,
                "resumed": outcome.resumed,
                "notes": outcome.notes,
            }
            for name, outcome in self.outcomes.items()
        ]
        return {
            "recipe": self.recipe.name,
            "prepare_seconds": self.prepare_seconds,
            "stages": stages,
            "evaluation": self.read("evaluate", "evaluation.json"),
            "selection": self.read("select", "selection.json"),
        }


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that a stage wrote."""
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value
