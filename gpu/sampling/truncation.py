"""Truncation by top_k, top_p and min_p: steps 8 to 10 of :mod:`trioserve.protocol.sampling`.

``top_k`` and ``top_p`` become one threshold for each row. It is searched among the largest few
values first, and in a full sort only if these don't suffice.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trioserve.protocol.sampling import SamplerParams

BLOCK = 128
"""Tokens in a block of the first race. The result of a seed depends on it, so it never changes."""
# Numbers of largest values to try before all are sorted.
_FEW = (128, 2048)


def truncate(scaled: Tensor, weights: Tensor, params: list[SamplerParams], cut: list[int]) -> None:
    """Apply steps 8 and 9 in place: zero the weights that top_k and top_p drop in rows ``cut``."""
    rows, vocab_size = scaled.shape
    device = scaled.device
    top_k = torch.tensor([min(p.top_k, vocab_size) for p in params], device=device)
    top_k[top_k <= 0] = vocab_size
    top_p = torch.tensor([p.top_p for p in params], device=device, dtype=torch.float64)
    totals = block_sums(weights).sum(dim=1)
    threshold = torch.full((rows,), -torch.inf, device=device)
    ties = torch.full((rows,), vocab_size, device=device)
    pending = torch.tensor(cut, device=device)
    for width in (*(few for few in _FEW if few < vocab_size), vocab_size):
        everything = len(pending) == rows
        values = _largest(scaled if everything else scaled[pending], width)
        found = _find_cut(values, vocab_size, totals[pending], top_k[pending], top_p[pending])
        threshold[pending] = found.threshold
        ties[pending] = found.ties
        pending = pending[~found.sure]
        if not len(pending):
            break
    drop_below(weights, scaled, threshold)
    for i in (ties < vocab_size).nonzero()[:, 0].tolist():
        equal = (scaled[i] == threshold[i]).nonzero()[:, 0]
        weights[i, equal[int(ties[i]) :]] = 0.0


def drop_below(weights: Tensor, values: Tensor, least: Tensor) -> None:
    """Zero the weights [n, V] in place where ``values`` are below the row's ``least`` [n]."""
    # On a CPU, comparing to float and multiplying takes a tenth of the time of masked_fill_.
    weights.mul_(torch.ge(values, least[:, None], out=torch.empty_like(values)))


def _largest(x: Tensor, width: int) -> Tensor:
    """Return the ``width`` largest values of each row of ``x`` [n, V], descending."""
    if width < x.shape[1]:
        return x.topk(width, dim=1).values
    if x.device.type == "cpu":
        # NumPy sorts values with vector instructions; torch always sorts indices with them.
        return torch.from_numpy(np.sort(x.numpy(), axis=1)).flip(1)
    return x.sort(dim=1, descending=True).values


@attrs.frozen
class _Cut:
    """For each row: keep values above ``threshold`` and the first ``ties`` tokens equal to it.

    A row that isn't ``sure`` needs more values.
    """

    threshold: Tensor
    ties: Tensor
    sure: Tensor


def _find_cut(
    values: Tensor, vocab_size: int, totals: Tensor, top_k: Tensor, top_p: Tensor
) -> _Cut:
    """Return the cuts of top_k and top_p, found in the largest values of each row.

    Args:
        values: [n, W] scaled logits, descending; the first is 0.
        vocab_size: the number of values in a whole row.
        totals: [n] float64, the sum of exp over the whole row.
        top_k: [n], 1 to ``vocab_size``; the latter means off.
        top_p: [n] float64, above 0; 1 means off.
    """
    width = values.shape[1]
    complete = width == vocab_size
    last = values[:, -1]
    kth = values.gather(1, top_k.clamp(max=width)[:, None] - 1)[:, 0]
    k_on, p_on = top_k < vocab_size, top_p < 1

    kept_by_k = (values >= kth[:, None]) | ~k_on[:, None]
    mass = torch.where(kept_by_k, values.exp().double(), 0.0).cumsum(dim=1)
    whole = mass[:, -1] if complete else torch.where(k_on, mass[:, -1], totals)
    before = (mass < (top_p * whole)[:, None]).sum(dim=1)
    reached = before < width
    pth = values.gather(1, before.clamp(max=width - 1)[:, None])[:, 0]

    threshold = torch.where(p_on, pth, kth)
    wanted = before + 1 - (values > threshold[:, None]).sum(dim=1)
    present = (values == threshold[:, None]).sum(dim=1)
    ends_inside = (last < threshold) | complete
    ties = torch.where(p_on & ~((present == wanted) & ends_inside), wanted, vocab_size)
    # More values equal to the last one may be outside of `values`; they count in top_p's total.
    k_sure = ~k_on | ((top_k <= width) & (~p_on | (kth > last)))
    sure = (k_sure & (~p_on | reached)) | complete
    return _Cut(threshold, ties, sure)


def block_sums(weights: Tensor) -> Tensor:
    """Return the sum of each block of each row: [n, ceil(V / BLOCK)] float64."""
    padding = -weights.shape[1] % BLOCK
    padded = functional.pad(weights, (0, padding)) if padding else weights
    return padded.view(len(weights), -1, BLOCK).sum(dim=2).double()
