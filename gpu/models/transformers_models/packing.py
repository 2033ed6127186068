"""Packs the linear layers of a transformers model for the CPU.

Native models use :class:`gpu.models.linear.Linear`, which makes bfloat16 on a CPU twice as fast at
small batches. The packed copy replaces the weight, so only modules that were seen to be called are
packed: a family may also use a weight without calling its module.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator

import torch

from gpu.models.linear import Linear, prepacks


@contextlib.contextmanager
def record_called_linears(model: torch.nn.Module) -> Iterator[set[torch.nn.Linear]]:
    """Yield a set that gets the linear layers called in the block, of those that can be packed."""
    called: set[torch.nn.Linear] = set()

    def note(module: torch.nn.Module, _: object) -> None:
        assert isinstance(module, torch.nn.Linear)
        called.add(module)

    products = [
        module
        for module in model.modules()
        if type(module) is torch.nn.Linear and prepacks(module.weight.dtype, module.weight.device)
    ]
    hooks = [module.register_forward_pre_hook(note) for module in products]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def pack(product: torch.nn.Linear) -> None:
    """Make a linear layer compute with a packed copy of its weight.

    The weight itself becomes NaN of the same shape and dtype, so that any other use gives NaN.
    """
    weight = product.weight.detach()
    packed = Linear(weight, None if product.bias is None else product.bias.detach())
    nothing = weight.new_full((), math.nan).expand(weight.shape)
    product.weight = torch.nn.Parameter(nothing, requires_grad=False)
    product.forward = functools.partial(_product, packed)  # type: ignore[method-assign]


def _product(packed: Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the packed product of ``x`` [..., in]: [..., out]."""
    return packed(x.reshape(-1, packed.in_features)).view(*x.shape[:-1], packed.out_features)
