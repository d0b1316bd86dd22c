"""The config group `rollout`: which engine samples, and where. It knows no other room, and no torch."""

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class Rollout:
    engine: str = MISSING
    max_rows: int = 256

    def problems(self) -> list[str]:
        if self.engine != "hf":
            return [f"rollout.engine={self.engine} is no engine: choose rollout=hf"]
        return [] if self.max_rows > 0 else [f"rollout.max_rows={self.max_rows} must be above 0: try 256"]
