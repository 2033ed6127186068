"""Checks of how results are rounded."""

from __future__ import annotations

import torch

__all__ = ["share_rounded_otherwise"]


def share_rounded_otherwise(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Return which share of ``actual`` isn't what ``exact`` [float64] gives when it is rounded
    once.

    A kernel that computes in float32 and rounds at its end differs only near ties, in a few numbers
    of a thousand. NaN counts as different.
    """
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    return (actual.cpu() != exact.cpu().to(actual.dtype)).double().mean().item()
