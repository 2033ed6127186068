"""The needs of each layer's attention, learnt by running the model on three tokens.

A configuration says it in a different way for every family; what arrives at the attention function
is the same for all. So is what gives away a model that isn't served: a layer that never asks for
attention has a state of another kind, a mask that was replaced hides which keys a query sees.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from gpu.models.transformers_models.attention import LayerShape
from gpu.models.transformers_models.interface import AttentionCall, answering
from trioserve.protocol.errors import ModelLoadError

NUM_TOKENS = 3
FAR = 1 << 20
"""A position further than any window is wide."""
ANOTHER = FAR + 12_345
"""One that stands elsewhere in any chunk."""


@attrs.frozen
class _Sight:
    """Stands for a mask: what a query sees."""

    window: int | None
    known: bool = True
    """False where it is neither all that came before nor a window of it."""


class _Probe:
    """Notes what the layers ask for, and answers with zeros."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.layers: dict[int, LayerShape] = {}

    def mask(self, function: Callable[..., torch.Tensor]) -> _Sight:
        first, second = (_seen(function, position) for position in (FAR, ANOTHER))
        if first == (0, FAR) and second == (0, ANOTHER):
            return _Sight(None)
        window = FAR - first[0] + 1
        slides = first[1] == FAR and second == (ANOTHER - window + 1, ANOTHER)
        # Some make masks that none of their layers takes.
        return _Sight(window, known=slides)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        index = call.layer
        if index < 0:
            raise self._refusal("doesn't number its layers")
        if index in self.layers:
            raise self._refusal(f"asks for the attention of its layer {index} more than once")
        if not isinstance(call.mask, _Sight):
            raise self._refusal(f"makes the mask of its layer {index} itself")
        if not call.mask.known:
            raise self._refusal("has attention that is neither causal nor a sliding window")
        if call.others:
            names = ", ".join(sorted(call.others))
            raise self._refusal(f"has attention with {names}, which isn't known here")
        heads, kv_heads = call.query.shape[1], call.key.shape[1]
        if heads % kv_heads or call.query.shape[0] != 1:
            raise self._refusal(f"has {heads} heads over {kv_heads} of keys in layer {index}")
        self.layers[index] = LayerShape(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=call.key.shape[3],
            value_dim=call.value.shape[3],
            window=call.mask.window,
        )
        tokens, value_dim = call.query.shape[2], call.value.shape[3]
        return call.query.new_zeros(tokens, heads, value_dim)

    def _refusal(self, reason: str) -> ModelLoadError:
        return refusal(self._name, reason)


def refusal(name: str, reason: str) -> ModelLoadError:
    """Why a model of the class ``name`` isn't served."""
    return ModelLoadError(f"{name} can't be served through transformers: it {reason}")


def probe_layers(body: torch.nn.Module, name: str, num_layers: int) -> list[LayerShape]:
    """Return what each layer of ``body`` wants of its attention.

    Args:
        body: a decoder without its head, in evaluation mode.
        name: of the class, for errors.
        num_layers: how many there are.

    Raises:
        ModelLoadError: the model does something that isn't served.
    """
    probe = _Probe(name)
    tokens = torch.arange(NUM_TOKENS)[None]
    with torch.inference_mode(), answering(probe):
        body(input_ids=tokens, position_ids=tokens.clone(), use_cache=False)
    if sorted(probe.layers) != list(range(num_layers)):
        raise refusal(
            name,
            f"has {num_layers} layers and asks for attention in {len(probe.layers)} of them: "
            "states of another kind aren't kept",
        )
    return [probe.layers[index] for index in range(num_layers)]


def _seen(function: Callable[..., torch.Tensor], position: int) -> tuple[int, int]:
    """Return the first and last position that a query sees; (-1, -1) if there are gaps."""
    keys = torch.arange(position + 2)
    seen = function(0, 0, torch.tensor(position), keys).expand(len(keys)).nonzero()
    if not len(seen):
        return -1, -1
    first, last = int(seen[0]), int(seen[-1])
    return (first, last) if len(seen) == last - first + 1 else (-1, -1)
