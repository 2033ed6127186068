"""Rules by which scores become weights, other than a softmax of products over sqrt(head_dim)."""

from __future__ import annotations

import math

import attrs
import torch


@attrs.frozen(eq=False, kw_only=True)
class ScoreRule:
    """The rule by which one layer turns the products of queries and keys into weights."""

    scale: float
    """They are multiplied by this."""
    softcap: float | None = None
    """Then they are squeezed into (-softcap, softcap): softcap * tanh(score / softcap)."""
    sinks: torch.Tensor | None = None  # [num_heads]
    """Scores of keys that aren't there: they take their share of the weights, and give nothing."""

    @property
    def is_plain(self) -> bool:
        """True if a softmax of the scaled products is all."""
        return self.softcap is None and self.sinks is None


def attend_by_rule(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rule: ScoreRule,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of ``queries`` [..., Q, D] to ``keys`` and ``values`` [..., N, D]: [..., Q, D].

    ``mask`` is added to the scores [..., Q, N]; ``sinks`` are the rule's, as [..., Q or 1, 1]. The
    weights are computed in float32, whatever the rest is in.
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
    """Return what most models do."""
    return ScoreRule(scale=1.0 / math.sqrt(head_dim))
