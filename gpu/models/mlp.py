"""The part of a layer after attention: a gated MLP or a mixture of experts.

A mixture sorts the tokens by expert, so that each expert computes one product over all its tokens.
A token's result depends on that token alone: its experts are the most probable ones (the first of
equally probable ones), and their outputs are added in float32 in the order of probability and
rounded once.

Shapes: T tokens, E = hidden_size, F = intermediate_size, X experts, k of them for a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from gpu.models.linear import Linear
from gpu.models.operations import Operations
from gpu.models.parallel.ranks import Ranks
from trioserve.model_files import ExpertsConfig


@attrs.frozen(kw_only=True)
class Mlp:
    """A gated MLP: that of a layer, or one expert."""

    gate_up: Linear  # E -> 2 F
    down: Linear  # F -> E


@attrs.frozen(kw_only=True)
class Experts:
    """The experts of a layer, and the router that chooses among them."""

    config: ExpertsConfig
    router: Linear  # E -> X
    experts: Sequence[Mlp | None]
    """By number; None for one that another rank has."""

    def forward(self, x: torch.Tensor, operations: Operations, ranks: Ranks) -> torch.Tensor:
        """Return the weighted sum of each token's experts: [T, E] of ``x`` [T, E].

        Each of ``ranks`` has the router, and some experts or a part of each. The host waits for the
        device once, to learn how many tokens each expert has.
        """
        per_token = self.config.per_token
        weights, chosen = choose_experts(self.router(x), self.config)
        pairs = chosen.flatten()  # [T k], the expert of each pair of token and expert
        order = pairs.argsort(stable=True)
        rows = x.index_select(0, order // per_token)
        results = torch.zeros_like(rows)
        first = 0
        for expert, count in zip(
            self.experts, pairs.bincount(minlength=len(self.experts)).tolist(), strict=True
        ):
            own = slice(first, first + count)
            if count and expert is not None:
                gated = operations.silu_mul(expert.gate_up(rows[own]))
                results[own] = expert.down(gated)
            first += count
        by_token = torch.empty_like(results)
        by_token[order] = results
        by_token = by_token.view(-1, per_token, x.shape[1])
        total = by_token[:, 0].float() * weights[:, :1]
        for place in range(1, per_token):
            total += by_token[:, place].float() * weights[:, place, None]
        return ranks.all_reduce(total).to(x.dtype)


def choose_experts(
    logits: torch.Tensor, config: ExpertsConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [T, k] float32 and numbers [T, k] int64 of each token's experts.

    The largest weight comes first. ``logits`` [T, X] are those of the router.
    """
    probabilities = logits.softmax(dim=-1, dtype=torch.float32)
    weights, chosen = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, chosen = weights[:, : config.per_token], chosen[:, : config.per_token]
    if config.normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen
