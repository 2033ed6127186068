"""Every target by its name."""

from __future__ import annotations

from tests.fuzz import (
    adapters,
    encoders,
    grammars,
    media,
    messages,
    model_files,
    requests,
    templates,
    texts,
)
from tests.fuzz.target import Target

__all__ = ["TARGETS"]

_MODULES = (model_files, encoders, adapters, messages, templates, texts, requests, grammars, media)
TARGETS: dict[str, Target] = {
    target.name: target for module in _MODULES for target in module.TARGETS
}
