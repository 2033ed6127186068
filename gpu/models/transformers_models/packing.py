"""The matrices of a model in the layout that the processor multiplies fastest.

:class:`gpu.models.linear.Linear` has it for native models: in bfloat16 on a CPU it gains a factor
of two at small batches. A matrix is given away for its packed copy, so only modules get one that
were seen to be called: a family may as well take the weight of one and multiply itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator

import torch

from gpu.models.linear import Linear, prepacks


@contextlib.contextmanager
def noting_products(model: torch.nn.Module) -> Iterator[set[torch.nn.Linear]]:
    """Yield the products of ``model`` that can be packed and were called in the block."""
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
    """Compute ``product`` from a packed copy of its weight from now on.

    What is left in its place has the shape and the number format, and is not a number: a
    computation that uses it after all gives NaN.
    """
    weight = product.weight.detach()
    packed = Linear(weight, None if product.bias is None else product.bias.detach())
    nothing = weight.new_full((), math.nan).expand(weight.shape)
    product.weight = torch.nn.Parameter(nothing, requires_grad=False)
    product.forward = functools.partial(_product, packed)  # type: ignore[method-assign]


def _product(packed: Linear, x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., in] times the weight: [..., out]."""
    return packed(x.reshape(-1, packed.in_features)).view(*x.shape[:-1], packed.out_features)
