"""Where a model's matrices go in the compiled decoder: which product of which layer."""

from __future__ import annotations

import enum
import re
from collections import Counter

import attrs

__all__ = ["NUM_PARTS", "Part", "Which", "part_of"]


class Which(enum.IntEnum):
    """The products of a model, as decoder_abi.cpp numbers them."""

    EMBEDDING = 0
    HEAD = 1
    QKV = 2
    OUTPUT = 3
    GATE_UP = 4
    DOWN = 5
    ROUTER = 6
    EXPERT_GATE_UP = 7
    EXPERT_DOWN = 8


_WHOLE = {"model.embed_tokens": Which.EMBEDDING, "lm_head": Which.HEAD}
_OF_LAYER = {
    "self_attn.q_proj": (Which.QKV, 0),
    "self_attn.k_proj": (Which.QKV, 1),
    "self_attn.v_proj": (Which.QKV, 2),
    "self_attn.o_proj": (Which.OUTPUT, 0),
    "mlp.gate_proj": (Which.GATE_UP, 0),
    "mlp.up_proj": (Which.GATE_UP, 1),
    "mlp.down_proj": (Which.DOWN, 0),
    "mlp.gate": (Which.ROUTER, 0),
}
_OF_EXPERT = {
    "gate_proj": (Which.EXPERT_GATE_UP, 0),
    "up_proj": (Which.EXPERT_GATE_UP, 1),
    "down_proj": (Which.EXPERT_DOWN, 0),
}
NUM_PARTS = Counter(which for which, _ in (*_OF_LAYER.values(), *_OF_EXPERT.values()))
"""By product, how many matrices it is made of."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")


@attrs.frozen
class Part:
    """A part of a product, the ``number``-th along its outputs."""

    which: Which
    layer: int
    expert: int
    number: int

    @property
    def product(self) -> tuple[Which, int, int]:
        """What it shares with the other parts."""
        return self.which, self.layer, self.expert


def part_of(module: str) -> Part | None:
    """The part that is called ``module``, such as ``model.layers.3.self_attn.k_proj``.

    None for what is no matrix.
    """
    if module in _WHOLE:
        return Part(_WHOLE[module], 0, 0, 0)
    match = _LAYER.fullmatch(module)
    if match is None:
        return None
    layer, inner = int(match[1]), match[2]
    if inner in _OF_LAYER:
        which, number = _OF_LAYER[inner]
        return Part(which, layer, 0, number)
    of_expert = _EXPERT.fullmatch(inner)
    if of_expert is None:
        return None
    which, number = _OF_EXPERT[of_expert[2]]
    return Part(which, layer, int(of_expert[1]), number)
