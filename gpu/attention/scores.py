"""Attention with another scale, soft cap or sinks than softmax(q k / sqrt(head_dim))."""

from __future__ import annotations

import math

import attrs
import torch


@attrs.frozen(eq=False, kw_only=True)
class ScoreRule:
    """The scale, soft cap and sinks with which one layer turns q k products into weights."""

    scale: float
    """Factor on the products."""
    softcap: float | None = None
    """Soft cap on the scaled scores: softcap * tanh(score / softcap)."""
    sinks: torch.Tensor | None = None  # [num_heads]
    """Attention sinks: a score that takes part in the softmax of each head, without a value."""

    @property
    def is_plain(self) -> bool:
        """True if the weights are a softmax of the scaled products."""
        return self.softcap is None and self.sinks is None


def attend_by_rule(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rule: ScoreRule,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention of ``queries`` [..., Q, D] to ``keys``, ``values`` [..., N, D]: [..., Q, D].

    ``mask`` is added to the scores [..., Q, N]; ``sinks`` are the rule's, as [..., Q or 1, 1]. The
    softmax is computed in float32.
    """
    scores = torch.matmul(queries, keys.transpose(-1, -2)) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights[..., : keys.shape[-2]], values)


def plain_rule(head_dim: int) -> ScoreRule:
    """Return the usual rule: softmax(q k / sqrt(head_dim))."""
    return ScoreRule(scale=1.0 / math.sqrt(head_dim))
