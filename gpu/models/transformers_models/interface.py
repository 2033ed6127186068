"""The attention and mask functions that transformers calls.

Both are registered once, by name. The backend is a context variable, because not every family
passes the arguments of its ``forward`` to its attention. Another thread may compute another model
at the same time.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import attrs
import torch

NAME = "trioserve"
"""Value of ``attn_implementation`` in a model's configuration."""

_IGNORED = frozenset(
    {
        "cache_position",
        "is_causal",  # the mask has it
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",  # queries and keys are already rotated
        "position_ids",
        "return_dict",
        "sliding_window",  # the mask has it
        "use_cache",
    }
)
"""Further arguments of transformers' attention functions that the eager one ignores."""


@attrs.frozen(kw_only=True, eq=False)
class AttentionCall:
    """The arguments of one layer's attention, with a batch of one and T tokens."""

    layer: int
    query: torch.Tensor  # [1, heads, T, head_dim]
    key: torch.Tensor  # [1, kv_heads, T, head_dim]
    value: torch.Tensor  # [1, kv_heads, T, value_dim]
    mask: Any
    """The result of :meth:`ModelBackend.mask`, unless the model has replaced it."""
    scale: float | None
    softcap: float | None
    sinks: torch.Tensor | None  # [heads]
    others: dict[str, Any]
    """Unknown arguments by name; they may change the result."""


class ModelBackend(Protocol):
    """Computes the masks and the attention of a model."""

    def mask(self, function: Callable[..., torch.Tensor]) -> object:
        """Return an object that the model passes to its layers as their mask.

        ``function`` takes the indices of batch and head and broadcastable int64 tensors of query
        and key positions; it returns a boolean tensor, true where a query sees a key.
        """

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the output of one layer's attention, [T, heads, value_dim]."""
        ...


_backend: contextvars.ContextVar[ModelBackend] = contextvars.ContextVar("trioserve attention")


@contextlib.contextmanager
def using_backend(backend: ModelBackend) -> Iterator[None]:
    """Make models in the block, in this thread, use ``backend`` for their attention."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def register() -> None:
    """Register the functions with transformers under :data:`NAME`."""
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
            if value is not None and name not in _IGNORED
        },
    )
    return _backend.get().attend(call)[None], None
