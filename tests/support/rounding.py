"""Bounds of rounding errors, derived from the arithmetic, never from the machine at hand.

A tolerance that was tuned on one processor fails on another, because a sum's order belongs to the
kernel. Two bounds hold in any order and with any instructions, FMA and tiles included:

- One sum of n terms: ``n u / (1 - n u)`` times the sum of the terms' magnitudes (Higham, *Accuracy
  and Stability of Numerical Algorithms*, 2nd ed., SIAM 2002, Lemma 3.1 and section 4.2).
- A chain of sums over data of mean zero, such as the layers of a model with random weights: the
  errors have either sign and add up like a random walk, so that ``λ √n u`` times the result's size
  is exceeded with probability ``2 n exp(-λ² / 2)`` (Higham and Mary, *Sharper probabilistic
  backward error analysis for basic linear algebra kernels with random data*, SIAM J. Sci. Comput.
  42, 2020).

A mistake in a model is worth thousands of such bounds.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["apart", "roundoff", "sum_error", "terms_of", "terms_of_folder"]

UNLIKELY = 8.0
"""λ: at a million outputs of a thousand terms, one run in ten million would exceed it."""


def roundoff(dtype: torch.dtype = torch.float32) -> float:
    """Return the unit roundoff: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def sum_error(terms: int, magnitude: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Bound the error of a sum of ``terms`` products in ``dtype``, in whatever order.

    ``magnitude`` is the sum of the products' absolute values, a number or an array of them.
    """
    error = terms * roundoff(dtype)
    assert error < 0.5, "a bound on so many terms says nothing"
    return error / (1 - error) * magnitude


def apart(terms: int, outputs: Any, dtype: torch.dtype = torch.float32) -> float:
    """Bound the distance between two computations of ``outputs`` by chains of ``terms`` terms.

    The outputs' root mean square is their size. Each computation has an error of its own, so the
    bound is twice that of one.
    """
    values = np.asarray(outputs, dtype=np.float64)
    size = math.sqrt(float(np.square(values[np.isfinite(values)]).mean()))
    return 2 * UNLIKELY * math.sqrt(terms) * roundoff(dtype) * size


def terms_of(*, hidden: int, inner: int, layers: int, tokens: int) -> int:
    """Count the terms of all sums in a row that an output of a transformer depends on.

    In a layer: two norms, the products for attention and MLP, a softmax over the tokens and the
    sum that it weighs; behind the layers the last norm and the head.
    """
    return layers * (6 * hidden + inner + 2 * tokens) + 2 * hidden


def terms_of_folder(folder: Path, tokens: int) -> int:
    """Return their number for the model with its config.json in ``folder``.

    A mixture's count is fourfold: an error of a router's score moves all numbers of a token
    together, so that such errors add up by their number and not by its root.
    """
    config = json.loads((folder / "config.json").read_text())

    def first(*names: str) -> int:
        return next(int(config[name]) for name in names if config.get(name))

    hidden = first("hidden_size", "dim", "n_embd")
    inner = next(
        (int(config[n]) for n in ("intermediate_size", "ffn_dim", "hidden_dim") if config.get(n)),
        4 * hidden,
    )
    layers = first("num_hidden_layers", "n_layers", "n_layer")
    terms = terms_of(hidden=hidden, inner=inner, layers=layers, tokens=tokens)
    return 4 * terms if any("experts" in name for name in config) else terms
