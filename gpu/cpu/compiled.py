"""A model computed by the compiled kernels: one call for a step's layers, one for its logits."""

from __future__ import annotations

import ctypes
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from gpu.cpu.adapters import CompiledAdapter, pack_adapter, step_of
from gpu.cpu.compiled_part import CompiledPart, cut_weights
from gpu.cpu.decoder_abi import DecoderLimits, DecoderShape, DecoderStep, DecoderVector, declare
from gpu.cpu.formats import ROUNDED, Format
from gpu.cpu.library import Library, no_room_for
from gpu.cpu.model import Floats
from gpu.cpu.parts import NUM_PARTS, ProductKind, ProductPart, part_of
from gpu.cpu.rank_memory import RankMemory
from gpu.cpu.step_arrays import CompiledStep, StepArrays
from gpu.executor import Content, Copies
from gpu.lora.reading import LoraWeights
from gpu.lora.store import AdapterStore
from gpu.models.parallel.adapter_parts import adapter_part
from gpu.models.rotary_positions import angles_at
from gpu.slots import Row, SlotTable
from gpu.weights.blocks import BFLOAT16, FLOAT32, Blocks, Numbers, Weight
from trioserve.model_files import ModelConfig
from trioserve.protocol.errors import ModelLoadError

StoreType = Callable[
    [ModelConfig, int, Callable[[LoraWeights], CompiledAdapter]], AdapterStore[CompiledAdapter]
]

_SOURCES = {BFLOAT16: 0, FLOAT32: 1}
_FROM_BLOCKS = 2


@attrs.define
class _Product:
    """The segments of one product that have been read."""

    weights: dict[int, Weight] = attrs.field(factory=dict)
    biases: dict[int, Numbers] = attrs.field(factory=dict)


class CompiledModel:
    """:class:`gpu.cpu.model.CpuModel` over ``library``; its activations are bfloat16.

    To be given its weights by :meth:`load`, and then its cache by :meth:`finish`.

    Args:
        quantization: one of ``auto``, ``none``, ``int8``, ``int4`` and ``w8a8``.
        threads: how many compute.
        max_rank: of adapters; 0 if there are to be none.
        part: of the model that this rank or stage computes; None for the whole.
        store: makes the store of its adapters, as :class:`~gpu.lora.store.AdapterStore` does.

    Raises:
        ModelLoadError: there is no room for so many threads.
    """

    def __init__(
        self,
        library: Library,
        config: ModelConfig,
        quantization: str,
        threads: int,
        *,
        max_rank: int = 0,
        part: CompiledPart | None = None,
        store: StoreType = AdapterStore[CompiledAdapter],
    ) -> None:
        self.config = config
        self.part = part
        self.threads = threads
        self.own = own = config if part is None else part.part.config()
        """The shape of what it computes: that of the model, or of the part."""
        self._adapters = store(config, max_rank, _packing(own, part))
        self.num_weights: Counter[Format] = Counter()
        """Number of matrices' numbers that are stored in each format."""
        self.quantization = quantization
        self._library = declare(library)
        self._shape = DecoderShape.of(own, threads)
        self._decoder: int = self._library.decoder_create(ctypes.byref(self._shape))
        if not self._decoder:
            raise ModelLoadError(no_room_for(threads))
        weakref.finalize(self, self._library.decoder_destroy, self._decoder)
        for index, (window, rotate) in enumerate(zip(own.windows, own.rope_layers, strict=True)):
            has_experts = own.experts_of(index) is not None
            set_layer = self._library.decoder_set_layer
            _check_memory(set_layer(self._decoder, index, window or 0, rotate, has_experts))
        self._products: dict[tuple[ProductKind, int, int], _Product] = {}
        self._qk_norms: dict[int, dict[str, Numbers]] = {}
        self._step = DecoderStep()
        self._step_pointer = ctypes.byref(self._step)
        self._arrays = StepArrays(0)
        self._states: Numbers = np.empty((0, config.hidden_size), dtype=BFLOAT16)
        self._hidden = self._states
        self._logits: Floats = np.empty((0, config.vocab_size), dtype=np.float32)
        self._finished: dict[str, Any] = {}
        """Arguments of :meth:`finish`."""

    @property
    def adapters(self) -> AdapterStore[CompiledAdapter]:
        """See :attr:`gpu.cpu.model.CpuModel.adapters`."""
        return self._adapters

    def describe_weights(self) -> str:
        """Return the formats of its matrices, that of most numbers first: ``Q4_1, Q8_0``."""
        return ", ".join(kind.name for kind, _ in self.num_weights.most_common())

    def wants(self, name: str) -> bool:
        """Return False for a tensor of the model of which nothing is in this part."""
        return self.part is None or self.part.part.has(name)

    def load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Take all weights of the model, each packed as soon as those are there that it is computed
        with. A part of a model keeps its part of each.

        Raises:
            ModelLoadError: no memory is left for them, or one is missing.
        """
        if self.part is not None:
            weights = cut_weights(self.part.part, weights)
        for name, weight in weights:
            self._take(name, weight)
        if self._products or self._qk_norms:
            raise ModelLoadError("the model's files lack a part of a layer")

    def shared_bytes(self, max_tokens: int) -> int:
        """Return the size of the ranks' memory for steps of up to ``max_tokens`` tokens."""
        assert self.part is not None
        ranks, max_rank = self.part.ranks_shape(0), self._adapters.max_rank
        size: int = self._library.decoder_ranks_bytes(
            ctypes.byref(self._shape), ctypes.byref(ranks), max_tokens, max_rank
        )
        return size

    def finish(
        self,
        cos_sin: Floats,
        *,
        page_size: int,
        num_pages: int,
        max_tokens: int,
        memory: RankMemory | None = None,
    ) -> None:
        """Make the KV cache and room for steps of up to ``max_tokens`` tokens.

        ``cos_sin`` is the table of :func:`gpu.models.rope.cos_sin_table`. A rank of several has
        ``memory`` in common with the others.

        Raises:
            ModelLoadError: there is no memory for them.
        """
        max_rank = self._adapters.max_rank
        limits = DecoderLimits(page_size, num_pages, max_tokens, len(cos_sin), max_rank)
        self._finished = {
            "cos_sin": cos_sin,
            "page_size": page_size,
            "num_pages": num_pages,
            "max_tokens": max_tokens,
            "memory": memory,
        }
        table = np.ascontiguousarray(cos_sin, dtype=np.float32)
        ranks = None
        if self.part is not None and self.part.slices:
            memory = memory or RankMemory.of_one_rank(self.shared_bytes(max_tokens))
            self._memory = memory  # which the decoder points to
            ranks = ctypes.byref(self.part.ranks_shape(memory.address))
        finish = self._library.decoder_finish
        _check_memory(finish(self._decoder, ctypes.byref(limits), table.ctypes.data, ranks))
        self._states = self._view(self._library.decoder_states(self._decoder), max_tokens)
        self._hidden = self._states
        if self.part is None or self.part.part.is_last:
            self._hidden = self._view(self._library.decoder_hidden(self._decoder), max_tokens)
        self._arrays = StepArrays(max_tokens, has_mrope=bool(self.config.mrope_section))

    def with_weights(self, weights: Iterable[tuple[str, Weight]]) -> CompiledModel:
        """Return a model with other ``weights``, with a cache of its own and this one's adapters.

        Raises:
            ModelLoadError: As in :meth:`load` and :meth:`finish`.
        """
        other = CompiledModel(
            self._library,
            self.config,
            self.quantization,
            self.threads,
            max_rank=self._adapters.max_rank,
            part=self.part,
            store=lambda *_: self._adapters,
        )
        other.load(weights)
        other.finish(**self._finished)
        return other

    def _view(self, address: int, rows: int) -> Numbers:
        """Return the decoder's rows of ``hidden_size`` numbers at an address."""
        numbers = (ctypes.c_uint16 * (rows * self.config.hidden_size)).from_address(address)
        view: Numbers = np.ctypeslib.as_array(numbers).view(BFLOAT16).reshape(rows, -1)
        return view

    def copy_pages(self, copies: Copies) -> None:
        """See :meth:`gpu.cpu.model.CpuModel.copy_pages`."""
        pairs = np.ascontiguousarray(copies, dtype=np.int32)
        self._library.decoder_copy_pages(self._decoder, pairs.ctypes.data, len(pairs))

    def begin_transfer(self) -> None:
        """Do nothing: all earlier steps are computed."""

    def read_page(self, number: int) -> Content:
        """See :meth:`gpu.cpu.model.CpuModel.read_page`."""
        content = np.empty(self._library.decoder_page_numbers(self._decoder) * 2, dtype=np.uint8)
        self._library.decoder_read_page(self._decoder, number, content.ctypes.data)
        return content

    def write_page(self, number: int, content: Content) -> None:
        """See :meth:`gpu.cpu.model.CpuModel.write_page`."""
        size = 2 * self._library.decoder_page_numbers(self._decoder)
        if content.dtype != np.uint8 or content.shape != (size,) or not content.flags.c_contiguous:
            raise ValueError(f"a page has {size} bytes, not {content.nbytes}")
        self._library.decoder_write_page(self._decoder, number, content.ctypes.data)

    def forward(
        self, rows: Sequence[Row], slots: SlotTable
    ) -> tuple[Numbers, npt.NDArray[np.integer]]:
        """See :meth:`gpu.cpu.model.CpuModel.forward`."""
        step = self.arrange(rows, slots)
        return self.compute(step), step.last_tokens(rows)

    def arrange(self, rows: Sequence[Row], slots: SlotTable) -> CompiledStep:
        """Return the step of ``rows``, valid until the next."""
        return self._arrays.arrange(rows, slots, adapters=bool(self._adapters))

    def states(self, count: int) -> Numbers:
        """Return the memory of the states [count, E] that a later stage's next step begins with."""
        return self._states[:count]

    def compute(self, given: CompiledStep) -> Numbers:
        """Return the hidden states [T, E] of a step's tokens, and fill the KV cache.

        If another stage has the final norm, what is returned are the states that the next stage
        begins with.
        """
        step, begins = self._step, self.part is None or self.part.part.is_first
        tokens = given.tokens.ctypes.data if begins else None
        if begins and given.embedded is not None:
            self._library.decoder_embed(self._decoder, tokens, len(given.tokens))
            self._states[given.embedded.places] = given.embedded.rows
            tokens = None
        step.num_rows, step.table_stride = given.block_tables.shape
        step.query_start = given.query_start.ctypes.data
        step.context_lens = given.context_lens.ctypes.data
        step.block_tables = given.block_tables.ctypes.data
        angles = angles_at(given.rotary_positions, self._finished["cos_sin"], self.config)
        step.angles = None if angles is None else angles.ctypes.data
        adapters = step_of(self._adapters, given.adapted) if given.adapted else None
        self._library.decoder_forward(
            self._decoder,
            tokens,
            self._step_pointer,
            None if adapters is None else ctypes.byref(adapters.step),
        )
        return self._hidden[: len(given.tokens)]

    def floats(self, hidden: Numbers) -> Floats:
        """See :meth:`gpu.cpu.model.CpuModel.floats`."""
        return hidden.astype(np.float32)

    def logits(self, hidden: Numbers, rows: npt.NDArray[np.integer] | None = None) -> Floats:
        """See :meth:`gpu.cpu.model.CpuModel.logits`. Of several ranks the first alone gets them."""
        count = len(hidden) if rows is None else len(rows)
        if count > len(self._logits):
            shape = (1 << (count - 1).bit_length(), self.config.vocab_size)
            self._logits = np.empty(shape, dtype=np.float32)
        chosen = None if rows is None else rows.astype(np.int32)
        self._library.decoder_logits(
            self._decoder,
            hidden.ctypes.data,
            None if chosen is None else chosen.ctypes.data,
            count,
            self._logits.ctypes.data,
        )
        return self._logits[:count]

    def most_probable(
        self, hidden: Numbers, rows: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int32] | None:
        """See :meth:`gpu.cpu.model.CpuModel.most_probable`."""
        chosen, best = rows.astype(np.int32), np.empty(len(rows), dtype=np.int32)
        self._library.decoder_most_probable(
            self._decoder, hidden.ctypes.data, chosen.ctypes.data, len(rows), best.ctypes.data
        )
        return best

    def _take(self, name: str, weight: Weight) -> None:
        module, _, last = name.rpartition(".")
        part = part_of(module)
        if part is None:
            assert isinstance(weight, np.ndarray)  # vectors are never kept as blocks
            match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module)
            self._take_vector(*((int(match[1]), match[2]) if match else (0, module)), weight)
        elif part.which in (ProductKind.EMBEDDING, ProductKind.HEAD):
            self._add_segment(*part.product, weight)
        else:
            self._take_part(part, last, weight)

    def _take_vector(self, layer: int, inner: str, weight: Numbers) -> None:
        if inner in ("self_attn.q_norm", "self_attn.k_norm"):
            norms = self._qk_norms.setdefault(layer, {})
            norms[inner[-6:]] = weight
            if len(norms) == 2:
                del self._qk_norms[layer]
                queries = np.tile(norms["q_norm"], self.own.num_heads)
                keys = np.tile(norms["k_norm"], self.own.num_kv_heads)
                self._set_vector(DecoderVector.QK_NORM, layer, np.concatenate([queries, keys]))
            return
        which = {
            "model.norm": DecoderVector.NORM,
            "input_layernorm": DecoderVector.ATTENTION_NORM,
            "post_attention_layernorm": DecoderVector.MLP_NORM,
        }[inner]
        self._set_vector(which, layer, weight)

    def _set_vector(self, which: DecoderVector, layer: int, values: Numbers) -> None:
        values = np.ascontiguousarray(values, dtype=BFLOAT16)
        pointer, count = values.ctypes.data, values.size
        _check_memory(self._library.decoder_set_vector(self._decoder, which, layer, pointer, count))

    def _take_part(self, part: ProductPart, last: str, weight: Weight) -> None:
        product = self._products.setdefault(part.product, _Product())
        if last == "weight":
            product.weights[part.number] = weight
        else:
            assert isinstance(weight, np.ndarray)
            product.biases[part.number] = weight
        biased = {
            ProductKind.QKV: self.config.qkv_bias,
            ProductKind.OUTPUT: self.config.output_bias,
            ProductKind.GATE_UP: self.config.mlp_bias,
            ProductKind.DOWN: self.config.mlp_bias,
        }.get(part.which, False)
        wanted = NUM_PARTS[part.which]
        if len(product.weights) < wanted or (biased and len(product.biases) < wanted):
            return
        del self._products[part.product]
        for index in range(wanted):
            self._add_segment(*part.product, product.weights[index])
        if biased:
            # What a bias is rounded to is what the torch path rounds it to.
            parts = [product.biases[index].astype(BFLOAT16) for index in range(wanted)]
            bias = np.concatenate(parts).astype(np.float32)
            set_bias = self._library.decoder_set_bias
            pointer, count = bias.ctypes.data, len(bias)
            _check_memory(set_bias(self._decoder, part.which, part.layer, pointer, count))

    def _add_segment(self, which: ProductKind, layer: int, expert: int, weight: Weight) -> None:
        if isinstance(weight, Blocks):
            kept = Format[weight.type.name]
            into = Format.W8A8 if self.quantization == "w8a8" else kept
            source, data = _FROM_BLOCKS, np.ascontiguousarray(weight.raw)
        else:
            into = ROUNDED.get(self.quantization, Format.BF16)
            if which == ProductKind.ROUTER:
                into = Format.BF16  # small, and every token's experts depend on it
            if into == Format.Q4_0 and which in (ProductKind.EMBEDDING, ProductKind.HEAD):
                into = Format.Q8_0  # as GGUF files have it: every token's logits depend on these
            source, data = _SOURCES[weight.dtype], np.ascontiguousarray(weight)
        outputs, inputs = weight.shape
        self.num_weights[into] += outputs * inputs
        add = self._library.decoder_add_segment
        pointer = data.ctypes.data
        place = (which, layer, expert)
        _check_memory(add(self._decoder, *place, into, source, pointer, outputs, inputs))


def _packing(
    own: ModelConfig, part: CompiledPart | None
) -> Callable[[LoraWeights], CompiledAdapter]:
    """Return the function that packs a rank's part of an adapter; ``own`` is the part's shape."""
    if part is None:
        return lambda adapter: pack_adapter(adapter, own)
    return lambda adapter: pack_adapter(adapter_part(adapter, part.part), own)


def _check_memory(given: int | None) -> None:
    if not given:
        raise ModelLoadError("no memory is left for the model: free some, or serve a smaller one")
