"""Finds the shape of each layer's attention by running the model on three tokens.

Configurations differ between families, but the arguments of the attention function don't. They also
show what can't be served: a layer that never calls it has another kind of state, and a replaced
mask doesn't show which keys a query sees.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from gpu.models.transformers_models.attention import LayerShape
from gpu.models.transformers_models.interface import AttentionCall, using_backend
from trioserve.protocol.errors import ModelLoadError

NUM_TOKENS = 3
FAR = 1 << 20
"""A position beyond the width of any sliding window."""
ANOTHER = FAR + 12_345
"""A second one, at another offset within a chunk, to tell chunked attention from a window."""


@attrs.frozen
class _ProbedMask:
    """The mask of a layer, reduced to its sliding window."""

    window: int | None
    known: bool = True
    """False if the mask is neither causal nor a sliding window."""


class _Probe:
    """A backend that records the shape of each layer and returns zeros."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.layers: dict[int, LayerShape] = {}

    def mask(self, function: Callable[..., torch.Tensor]) -> _ProbedMask:
        first, second = (_visible(function, position) for position in (FAR, ANOTHER))
        if first == (0, FAR) and second == (0, ANOTHER):
            return _ProbedMask(None)
        window = FAR - first[0] + 1
        slides = first[1] == FAR and second == (ANOTHER - window + 1, ANOTHER)
        # Not refused here, since some models make masks that no layer uses.
        return _ProbedMask(window, known=slides)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        index = call.layer
        if index < 0:
            raise self._refusal("doesn't number its layers")
        if index in self.layers:
            raise self._refusal(f"asks for the attention of its layer {index} more than once")
        if not isinstance(call.mask, _ProbedMask):
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
    """Return the error for a model of the class ``name`` that isn't served."""
    return ModelLoadError(f"{name} can't be served through transformers: it {reason}")


def probe_layers(body: torch.nn.Module, name: str, num_layers: int) -> list[LayerShape]:
    """Return the shape of each layer's attention.

    Args:
        body: a decoder without its head, in evaluation mode.
        name: the name of its class, for errors.
        num_layers: the number of its layers.

    Raises:
        ModelLoadError: the model's attention isn't supported.
    """
    probe = _Probe(name)
    tokens = torch.arange(NUM_TOKENS)[None]
    with torch.inference_mode(), using_backend(probe):
        body(input_ids=tokens, position_ids=tokens.clone(), use_cache=False)
    if sorted(probe.layers) != list(range(num_layers)):
        raise refusal(
            name,
            f"has {num_layers} layers and asks for attention in {len(probe.layers)} of them: "
            "states of another kind aren't kept",
        )
    return [probe.layers[index] for index in range(num_layers)]


def _visible(function: Callable[..., torch.Tensor], position: int) -> tuple[int, int]:
    """Return the first and last position that the query at ``position`` sees; (-1, -1) for gaps."""
    keys = torch.arange(position + 2)
    seen = function(0, 0, torch.tensor(position), keys).expand(len(keys)).nonzero()
    if not len(seen):
        return -1, -1
    first, last = int(seen[0]), int(seen[-1])
    return (first, last) if len(seen) == last - first + 1 else (-1, -1)
