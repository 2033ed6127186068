"""Pipeline parallel: the layers of each stage, and how a model's layers are split into stages."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence

import attrs

from gpu.weights.packed_modules import PackedShape, expert_shapes, packed_shapes
from trioserve.model_files.config import ModelConfig
from trioserve.protocol.errors import ModelLoadError

_OPTION = "--pipeline-parallel-size"
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_ROWS = 8
"""Rows of the step whose cost decides: each of them may use other experts."""


@attrs.frozen
class Stage:
    """The layers ``first`` to ``stop`` - 1 of the model of ``whole``.

    The first stage has the embedding, the last one the final norm and the head.
    """

    whole: ModelConfig
    first: int
    stop: int

    @property
    def is_first(self) -> bool:
        """True if the stage begins with the model's tokens."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """True if the stage ends with the model's logits."""
        return self.stop == self.whole.num_layers

    def config(self) -> ModelConfig:
        """Return the shape of a model that has the stage's layers only."""
        whole, own = self.whole, slice(self.first, self.stop)
        experts = whole.experts
        if experts is not None:
            experts = attrs.evolve(experts, layers=experts.layers[own])
        return attrs.evolve(
            whole,
            num_layers=self.stop - self.first,
            windows=whole.windows[own],
            rope_layers=whole.rope_layers[own],
            experts=experts,
        )

    def layer_of(self, layer: int) -> int | None:
        """Return the number in the stage of a layer of the model; None if it isn't there."""
        return layer - self.first if self.first <= layer < self.stop else None

    def name_of(self, name: str) -> str | None:
        """Return the name in the stage of a tensor of the model; None if the stage hasn't got it.

        A head that is tied to the embedding makes the last stage have that too.
        """
        match = _OF_LAYER.fullmatch(name)
        if match is not None:
            layer = self.layer_of(int(match[1]))
            return None if layer is None else f"model.layers.{layer}.{match[2]}"
        is_here = self.is_last
        if name == "model.embed_tokens.weight":
            is_here = self.is_first or (self.is_last and self.whole.tie_word_embeddings)
        return name if is_here else None


def stages_of(config: ModelConfig, num_stages: int, given: Sequence[int] = ()) -> list[Stage]:
    """Return the stages of a model, about equal by the weights that a step reads.

    Args:
        config: The model's shape.
        num_stages: Number of stages.
        given: Number of layers of each stage, where the operator has chosen it.

    Raises:
        ModelLoadError: There are more stages than layers, or ``given`` are not the model's.
    """
    if given:
        ends = [0, *itertools.accumulate(given)]
        if ends[-1] != config.num_layers:
            raise ModelLoadError(
                f"--pipeline-parallel-layers has {ends[-1]} layers, and the model "
                f"{config.num_layers}"
            )
        return [Stage(config, first, stop) for first, stop in itertools.pairwise(ends)]
    if num_stages > config.num_layers:
        raise ModelLoadError(
            f"{_OPTION} {num_stages} is more than the model's {config.num_layers} layers"
        )
    layers = [weights_read(config, layer) for layer in range(config.num_layers)]
    head = float(config.vocab_size * config.hidden_size)
    parts = split_layers(layers, [1.0] * num_stages, head=head)
    return [Stage(config, part.start, part.stop) for part in parts]


def weights_read(config: ModelConfig, layer: int) -> float:
    """Return the number of weights of a layer that a step of some rows reads."""
    read = _size(packed_shapes(config, layer))
    experts = config.experts_of(layer)
    if experts is not None:
        used = min(experts.count, _ROWS * experts.per_token)
        read += used * _size(expert_shapes(config, experts, 0))
    return read


def _size(shapes: Mapping[str, PackedShape]) -> float:
    return float(sum(sum(each.outputs.values()) * each.inputs for each in shapes.values()))


def split_layers(
    layers: Sequence[float], paces: Sequence[float], *, head: float = 0.0
) -> list[range]:
    """Split layers into stages of at least one, so that the longest stage is as short as possible.

    Of several such splits, return that with the smallest sum of squares, and with more layers in
    its first stages.

    Args:
        layers: Size of each layer, in any unit.
        paces: Time that each stage takes for a layer of size 1; there are at most as many stages as
            layers.
        head: Time that the last stage takes besides its layers.
    """
    num_stages = len(paces)
    until = [0.0, *itertools.accumulate(layers)]

    def time(stage: int, first: int, stop: int) -> float:
        added = head if stage == num_stages - 1 else 0.0
        return paces[stage] * (until[stop] - until[first]) + added

    def best(join: Callable[[float, float], float]) -> tuple[float, list[int]]:
        """Return the least value of all splits, joined stage by stage, and where stages end."""
        found: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
        for stage in range(num_stages):
            later = num_stages - 1 - stage
            found = {
                stop: min(
                    (
                        (join(value, time(stage, first, stop)), [*ends, stop])
                        for first, (value, ends) in found.items()
                        if first < stop
                    ),
                    key=lambda each: (each[0], [-end for end in each[1]]),
                )
                for stop in range(stage + 1, len(layers) - later + 1)
            }
        return found[len(layers)]

    longest, _ = best(max)
    limit = longest * (1 + 1e-9)
    _, ends = best(lambda value, each: value + each**2 if each <= limit else math.inf)
    return list(itertools.starmap(range, itertools.pairwise([0, *ends])))
