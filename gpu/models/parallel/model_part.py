"""The part of a model that one rank has: its shape, and its piece of each tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from gpu.models.parallel.stages import Stage, stages_of
from trioserve.model_files.config import ModelConfig
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.wire import Start

if TYPE_CHECKING:
    import torch

_OPTION = "--tensor-parallel-size"
_BY_OUTPUTS = re.compile(r".*\.(gate|up)_proj\.(weight|bias)")
_BY_INPUTS = re.compile(r".*\.(o|down)_proj\.weight")
_ADDED = re.compile(r".*\.(o|down)_proj\.bias")
_OF_HEADS = re.compile(r".*\.self_attn\.([qkv])_proj\.(weight|bias)")
_OF_EXPERT = re.compile(r".*\.mlp\.experts\.(\d+)\..*")
_OF_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@attrs.frozen
class ModelPart:
    """The part that rank ``rank`` of ``size`` has of the model of ``whole``.

    With ``by_expert`` a rank has some of the experts of each layer, else a part of each expert.
    With a ``stage`` it has a part of that stage's layers only.

    Raises:
        ModelLoadError: The model can't be split so; the message names the number and the option.
    """

    whole: ModelConfig
    rank: int
    size: int
    by_expert: bool = False
    stage: Stage | None = None

    def __attrs_post_init__(self) -> None:
        whole, size = self.whole, self.size
        if whole.num_heads % size:
            raise ModelLoadError(
                f"{_OPTION} {size} doesn't divide the model's {whole.num_heads} heads"
            )
        kv_heads = whole.num_kv_heads
        if kv_heads % size and size % kv_heads:
            raise ModelLoadError(
                f"{_OPTION} {size} neither divides the model's {kv_heads} heads of keys and values "
                "nor is a multiple of them"
            )
        for inner in self.split_sizes():
            if inner % size:
                raise ModelLoadError(
                    f"{_OPTION} {size} doesn't divide the intermediate size {inner}"
                )

    def split_sizes(self) -> Iterator[int]:
        """Yield the intermediate sizes of the MLPs that are split by their intermediate size."""
        for layer in range(self.whole.num_layers):
            experts = self.whole.experts_of(layer)
            if experts is None:
                yield self.whole.intermediate_size
            elif not self.by_expert:
                yield experts.intermediate_size

    def has_expert(self, number: int) -> bool:
        """Return True if this rank has the expert ``number``, whole or in part."""
        experts = self.whole.experts
        assert experts is not None
        return not self.by_expert or number * self.size // experts.count == self.rank

    @property
    def is_first(self) -> bool:
        """True if this rank has some of the embedding to begin with."""
        return self.stage is None or self.stage.is_first

    @property
    def is_last(self) -> bool:
        """True if this rank has the final norm and some of the head."""
        return self.stage is None or self.stage.is_last

    def layer_of(self, layer: int) -> int | None:
        """Return the number in this part of a layer of the model; None if it isn't there."""
        return layer if self.stage is None else self.stage.layer_of(layer)

    def name_of(self, name: str) -> str | None:
        """Return the name in this part of a tensor of the model; None if none of it is there."""
        expert = _OF_EXPERT.fullmatch(name)
        if expert is not None and not self.has_expert(int(expert[1])):
            return None
        return name if self.stage is None else self.stage.name_of(name)

    @property
    def vocab_part(self) -> int:
        """Number of tokens whose embeddings a rank has; the last rank's are padded with zeros."""
        return -(-self.whole.vocab_size // self.size)

    @property
    def first_token(self) -> int:
        """First token whose embedding this rank has."""
        return self.rank * self.vocab_part

    def config(self) -> ModelConfig:
        """Return the shape of this rank's part. Ranks that share a head of keys each have it."""
        whole, size = self.whole, self.size
        if self.stage is not None:
            whole = self.stage.config()
        experts = whole.experts
        if experts is not None and not self.by_expert:
            experts = attrs.evolve(experts, intermediate_size=experts.intermediate_size // size)
        return attrs.evolve(
            whole,
            vocab_size=self.vocab_part,
            num_heads=whole.num_heads // size,
            num_kv_heads=max(whole.num_kv_heads // size, 1),
            intermediate_size=whole.intermediate_size // size,
            experts=experts,
        )

    def has(self, name: str) -> bool:
        """Return True if this rank has the tensor ``name``, whole or in part."""
        return self.name_of(name) is not None

    def piece(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's piece of the tensor ``name``, in memory of its own if it is smaller.

        Return None if it has none.
        """
        if not self.has(name):
            return None
        if name in _OF_VOCABULARY:
            return self._of_vocabulary(name, tensor)
        if _ADDED.fullmatch(name):  # once to the sum
            return tensor if self.rank == 0 else tensor.new_zeros(tensor.shape)
        dim, own = self.cut(name, tensor.shape)
        if own == slice(None):
            return tensor
        return (tensor[:, own] if dim else tensor[own]).contiguous().clone()

    def cut(self, name: str, shape: Sequence[int]) -> tuple[int, slice]:
        """Return the dimension in which the tensor ``name`` is split, and this rank's part of it.

        It is the whole if the tensor isn't split. The last part of the vocabulary may be smaller.
        """
        if self.by_expert and _OF_EXPERT.fullmatch(name):
            return 0, slice(None)
        if name in _OF_VOCABULARY:
            return 0, slice(self.first_token, self.first_token + self.vocab_part)
        match = _OF_HEADS.fullmatch(name)
        if match is not None:
            of_queries, size = match[1] == "q", self.whole.head_dim
            heads = self._heads(self.whole.num_heads if of_queries else self.whole.num_kv_heads)
            return 0, slice(heads.start * size, heads.stop * size)
        if _BY_OUTPUTS.fullmatch(name):
            return 0, self._part_of(shape[0])
        if _BY_INPUTS.fullmatch(name):
            return 1, self._part_of(shape[1])
        return 0, slice(None)

    def of_page(self) -> tuple[slice, slice]:
        """Return the layers of the model, and the heads, whose keys and values this rank has."""
        heads = self._heads(self.whole.num_kv_heads)
        if self.stage is None:
            return slice(0, self.whole.num_layers), heads
        return slice(self.stage.first, self.stage.stop), heads

    def _heads(self, every: int) -> slice:
        """Return the heads of this rank, of ``every`` in the model; ranks may share one."""
        first = self.rank * every // self.size
        return slice(first, first + max(every // self.size, 1))

    def _part_of(self, count: int) -> slice:
        part = count // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def _of_vocabulary(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.new_zeros(self.vocab_part, *tensor.shape[1:])
        there = tensor[self.cut(name, tensor.shape)[1]]
        own[: len(there)] = there
        return own


def parts_of_worker(start: Start, config: ModelConfig) -> list[ModelPart]:
    """Return the part of each rank of a worker, in which those of a stage follow each other.

    Raises:
        ModelLoadError: The model can't be split as ``start`` says.
    """
    stages: Sequence[Stage | None] = [None]
    if start.pipeline_parallel_size > 1:
        stages = stages_of_worker(start, config)
    size, by_expert = start.tensor_parallel_size, start.enable_expert_parallel
    return [
        ModelPart(config, rank, size, by_expert, stage) for stage in stages for rank in range(size)
    ]


def part_of_rank(start: Start, config: ModelConfig, number: int) -> ModelPart:
    """Return the part of rank ``number``; see :func:`parts_of_worker`."""
    return parts_of_worker(start, config)[number]


def stages_of_worker(start: Start, config: ModelConfig) -> list[Stage]:
    """Return the stages of a worker.

    Raises:
        ModelLoadError: The model can't be split as ``start`` says.
    """
    return stages_of(config, start.pipeline_parallel_size, start.pipeline_parallel_layers)


def parts_in_words(start: Start, config: ModelConfig, slices: int = 0) -> str:
    """Return what the log says of stages, ranks and slices, with a comma in front, if anything."""
    found = ""
    if start.pipeline_parallel_size > 1:
        stages = stages_of_worker(start, config)
        found += f", stages of {' + '.join(str(each.stop - each.first) for each in stages)} layers"
    if start.num_ranks > 1 or slices:
        found += f", {start.num_ranks} ranks"
    return found + (f", {slices} slices" if slices else "")
