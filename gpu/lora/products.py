"""Which projections of a layer are computed as one product."""

from __future__ import annotations

__all__ = ["PRODUCTS"]

PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""By product, its parts in the order of their outputs. All of them may have updates."""
