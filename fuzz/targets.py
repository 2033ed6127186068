"""Every target by its name."""

from __future__ import annotations

from fuzz import model_files
from fuzz.target import Target

__all__ = ["TARGETS"]

TARGETS: dict[str, Target] = {target.name: target for target in model_files.TARGETS}
