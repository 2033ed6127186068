"""The function that transformers asks for attention, and the one it asks for masks.

Both are registered once, by name. The back end in use is a context variable, since not every family
hands the arguments of its ``forward`` down to its attention; so another thread may compute with
another model at the same time.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import attrs
import torch

NAME = "trioserve"
"""Value of ``attn_implementation`` in the configuration of a model."""

_HARMLESS = frozenset(
    {
        "cache_position",
        "is_causal",  # the mask says it
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",  # queries and keys are rotated already
        "position_ids",
        "return_dict",
        "sliding_window",  # the mask says it
        "use_cache",
    }
)
"""Further arguments of transformers' attention functions that its eager one doesn't look at."""


@attrs.frozen(kw_only=True, eq=False)
class AttentionCall:
    """One layer's call of its attention, with a batch of one and T tokens."""

    layer: int
    query: torch.Tensor  # [1, heads, T, head_dim]
    key: torch.Tensor  # [1, kv_heads, T, head_dim]
    value: torch.Tensor  # [1, kv_heads, T, value_dim]
    mask: Any
    """The mask as the back end made it, unless the model has replaced it."""
    scale: float | None
    softcap: float | None
    sinks: torch.Tensor | None  # [heads]
    others: dict[str, Any]
    """Arguments that change the result, by names that nothing here knows."""


class ModelBackend(Protocol):
    """Answers a model that is being run."""

    def mask(self, function: Callable[..., torch.Tensor]) -> object:
        """Return the stand-in for a mask; ``function`` tells whether a query sees a key.

        It is called with the numbers of batch and head and with broadcastable int64 tensors of the
        positions of queries and keys, and gives booleans.
        """

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attended values, [T, heads, value_dim]."""
        ...


_backend: contextvars.ContextVar[ModelBackend] = contextvars.ContextVar("trioserve attention")


@contextlib.contextmanager
def answering(backend: ModelBackend) -> Iterator[None]:
    """Models that run in the block, in this thread, have their attention from ``backend``."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def register() -> None:
    """Make the functions known to transformers under :data:`NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*, mask_function: Callable[..., torch.Tensor], **_: Any) -> object:
    return _backend.get().mask(mask_function)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    call = AttentionCall(
        layer=getattr(module, "layer_idx", -1),
        query=query,
        key=key,
        value=value,
        mask=attention_mask,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        others={
            name: value
            for name, value in others.items()
            if value is not None and name not in _HARMLESS
        },
    )
    return _backend.get().attend(call)[None], None
