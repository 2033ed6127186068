"""The paged cache of a model with layers of different shapes, and the attention over it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from gpu.attention import CacheShape, StepLayout
from gpu.attention.scores import ScoreRule
from gpu.executor import Copies
from gpu.models.transformers_models.images import ImageAttention
from gpu.models.transformers_models.interface import AttentionCall
from trioserve.protocol.embeddings import ImageGrid


@attrs.frozen(kw_only=True)
class LayerShape:
    """The shape of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    """Number of positions that a query sees, including its own; None for all."""

    @property
    def cache_dim(self) -> int:
        """Size of keys and values in the cache; the shorter ones are padded."""
        return max(self.head_dim, self.value_dim)

    @property
    def numbers_per_token(self) -> int:
        """Numbers in the cache for each token: keys and values of all heads."""
        return 2 * self.num_kv_heads * self.cache_dim


class PagedLayers:
    """The paged attention of all layers: a :class:`~.interface.ModelBackend`.

    Layers of equal shape share one :class:`~.images.ImageAttention`. A page has the same number in
    all of them.
    """

    def __init__(
        self, layers: Sequence[LayerShape], *, page_size: int, num_pages: int, dtype: torch.dtype
    ) -> None:
        self._layers = layers
        alike: dict[tuple[int, int, int], list[int]] = {}
        for index, layer in enumerate(layers):
            shape = (layer.num_heads, layer.num_kv_heads, layer.cache_dim)
            alike.setdefault(shape, []).append(index)
        self._parts: list[ImageAttention] = []
        self._part_of: dict[int, tuple[ImageAttention, int]] = {}
        """By layer: its part, and its index in it."""
        for (num_heads, num_kv_heads, cache_dim), indices in alike.items():
            shape_of_part = CacheShape(
                num_layers=len(indices),
                num_pages=num_pages,
                page_size=page_size,
                num_kv_heads=num_kv_heads,
                head_dim=cache_dim,
                dtype=dtype,
                device=torch.device("cpu"),
            )
            windows = [layers[index].window for index in indices]
            part = ImageAttention(shape_of_part, num_heads, None, windows)
            self._parts.append(part)
            self._part_of.update({index: (part, at) for at, index in enumerate(indices)})

    def copy_pages(self, copies: Copies) -> None:
        """See :meth:`gpu.attention.Attention.copy_pages`."""
        for part in self._parts:
            part.copy_pages(copies)

    def page(self, number: int) -> list[torch.Tensor]:
        """See :meth:`gpu.attention.Attention.page`."""
        return [tensor for part in self._parts for tensor in part.page(number)]

    def see_images(self, images: Mapping[int, Sequence[ImageGrid]]) -> None:
        """Let the tokens of images see each other in the next step; they are by slot."""
        for part in self._parts:
            part.images = images

    def begin(self, layout: StepLayout) -> None:
        """See :meth:`gpu.attention.Attention.begin`."""
        self.positions = torch.from_numpy(layout.positions)
        for part in self._parts:
            part.begin(layout)

    def mask(self, function: Callable[..., torch.Tensor]) -> object:
        """Return None: no mask is needed, since the layout has the visible positions."""
        return None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write the keys and values of a layer to its pages; return the attention over them."""
        layer = self._layers[call.layer]
        part, index = self._part_of[call.layer]
        query, key, value = (
            _padded(heads[0].transpose(0, 1), layer.cache_dim)
            for heads in (call.query, call.key, call.value)
        )
        part.write(index, torch.cat([key, value], dim=1))
        scale = 1.0 / math.sqrt(layer.head_dim) if call.scale is None else call.scale
        rule = ScoreRule(scale=scale, softcap=call.softcap, sinks=call.sinks)
        return part.attend(index, query, layer.window, rule)[..., : layer.value_dim]


def _padded(heads: torch.Tensor, size: int) -> torch.Tensor:
    missing = size - heads.shape[-1]
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads
