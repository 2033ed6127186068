"""A model computed by the compiled kernels: one call for a step's layers, one for its logits."""

from __future__ import annotations

import ctypes
import enum
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from gpu.cpu.adapters import CompiledAdapter, pack_adapter, step_of
from gpu.cpu.decoder_abi import DecoderLimits, DecoderShape, DecoderStep, DecoderVector, declare
from gpu.cpu.library import Library, no_room_for
from gpu.cpu.model import Floats
from gpu.cpu.parts import NUM_PARTS, ProductKind, ProductPart, part_of
from gpu.executor import Content, Copies
from gpu.lora.groups import tokens_by_adapter
from gpu.lora.store import AdapterStore
from gpu.slots import Row, SlotTable
from gpu.weights.blocks import BFLOAT16, FLOAT32, Blocks, Numbers, Weight
from trioserve.model_files import ModelConfig
from trioserve.protocol.errors import ModelLoadError


class Format(enum.IntEnum):
    """The storage format of a packed weight; the values are those of ``Kind`` in product.h."""

    BF16 = 0
    Q8_0 = 1
    Q4_0 = 2
    Q4_1 = 3
    W8A8 = 4


_KEPT = {
    "auto": ("Q8_0", "Q4_0", "Q4_1"),
    "int8": ("Q8_0",),
    "int4": ("Q4_0", "Q4_1"),
    "w8a8": ("Q8_0",),
}
"""By quantization, the types of a GGUF file's matrices that are packed as they are."""
_ROUNDED = {"int8": Format.Q8_0, "int4": Format.Q4_0, "w8a8": Format.W8A8}
"""Formats that other matrices are rounded to; without one they are bfloat16."""


_SOURCES = {BFLOAT16: 0, FLOAT32: 1}
_FROM_BLOCKS = 2


def obstacle_in(config: ModelConfig) -> str | None:
    """Why the compiled kernels can't compute a model of this shape; None if they can."""
    if config.head_dim % 32 or config.head_dim > 256:
        return f"heads of {config.head_dim} numbers"
    for size in (config.hidden_size, *config.mlp_sizes):
        if size % 32:
            return f"{size} numbers, which are no whole blocks of 32"
    return None


def read_as(quantization: str) -> tuple[np.dtype[Any] | None, tuple[str, ...]]:
    """Return what :func:`gpu.weights.read_weights` is to give: ``dtype`` and ``keep``."""
    dtype = None if quantization in _ROUNDED else BFLOAT16
    return dtype, _KEPT.get(quantization, ())


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
    ) -> None:
        self.config = config
        self._adapters = AdapterStore[CompiledAdapter](
            config, max_rank, lambda adapter: pack_adapter(adapter, config)
        )
        self.num_weights: Counter[Format] = Counter()
        """Number of matrices' numbers that are stored in each format."""
        self.quantization = quantization
        self._library = declare(library)
        shape = DecoderShape.of(config, threads)
        self._decoder: int = self._library.decoder_create(ctypes.byref(shape))
        if not self._decoder:
            raise ModelLoadError(no_room_for(threads))
        weakref.finalize(self, self._library.decoder_destroy, self._decoder)
        for index, (window, rotate) in enumerate(
            zip(config.windows, config.rope_layers, strict=True)
        ):
            has_experts = config.experts_of(index) is not None
            set_layer = self._library.decoder_set_layer
            _check_memory(set_layer(self._decoder, index, window or 0, rotate, has_experts))
        self._products: dict[tuple[ProductKind, int, int], _Product] = {}
        self._qk_norms: dict[int, dict[str, Numbers]] = {}
        self._step = DecoderStep()
        self._step_pointer = ctypes.byref(self._step)
        self._arrays = _StepArrays(0)
        self._tokens = 0
        self._hidden: Numbers = np.empty((0, config.hidden_size), dtype=BFLOAT16)
        self._logits: Floats = np.empty((0, config.vocab_size), dtype=np.float32)

    @property
    def adapters(self) -> AdapterStore[CompiledAdapter]:
        """See :attr:`gpu.cpu.model.CpuModel.adapters`."""
        return self._adapters

    def describe_weights(self) -> str:
        """Return the formats of its matrices, that of most numbers first: ``Q4_1, Q8_0``."""
        return ", ".join(kind.name for kind, _ in self.num_weights.most_common())

    def load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Take all weights, each packed as soon as those are there that it is computed with.

        Raises:
            ModelLoadError: no memory is left for them, or one is missing.
        """
        for name, weight in weights:
            self._take(name, weight)
        if self._products or self._qk_norms:
            raise ModelLoadError("the model's files lack a part of a layer")

    def finish(self, cos_sin: Floats, *, page_size: int, num_pages: int, max_tokens: int) -> None:
        """Make the KV cache and room for steps of up to ``max_tokens`` tokens.

        ``cos_sin`` is the table of :func:`gpu.models.rope.cos_sin_table`.

        Raises:
            ModelLoadError: there is no memory for them.
        """
        max_rank = self._adapters.max_rank
        limits = DecoderLimits(page_size, num_pages, max_tokens, len(cos_sin), max_rank)
        table = np.ascontiguousarray(cos_sin, dtype=np.float32)
        finish = self._library.decoder_finish
        _check_memory(finish(self._decoder, ctypes.byref(limits), table.ctypes.data, None))
        shape = (max_tokens, self.config.hidden_size)
        memory = (ctypes.c_uint16 * (shape[0] * shape[1])).from_address(
            self._library.decoder_hidden(self._decoder)
        )
        self._hidden = np.ctypeslib.as_array(memory).view(BFLOAT16).reshape(shape)
        self._arrays = arrays = _StepArrays(max_tokens)
        self._step.context_lens = arrays.context_lens.ctypes.data
        self._tokens = arrays.tokens.ctypes.data

    def copy_pages(self, copies: Copies) -> None:
        """See :meth:`gpu.cpu.model.CpuModel.copy_pages`."""
        pairs = np.ascontiguousarray(copies, dtype=np.int32)
        self._library.decoder_copy_pages(self._decoder, pairs.ctypes.data, len(pairs))

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
        arrays, count = self._arrays, len(rows)
        arrays.context_lens[:count] = [row.stop for row in rows]
        if all(row.num_computed == 1 for row in rows):
            num_tokens = count
            arrays.tokens[:count] = [row.slot.token(row.start) for row in rows]
            query_start = arrays.numbers
        else:
            query_start = arrays.query_start
            np.cumsum([row.num_computed for row in rows], out=query_start[1 : count + 1])
            num_tokens = int(query_start[count])
            tokens = [row.slot.span(row.start, row.stop) for row in rows]
            np.concatenate(tokens, out=arrays.tokens[:num_tokens])
        width = max(row.slot.num_pages for row in rows)
        tables = slots.block_tables[[row.slot.number for row in rows], :width]
        step = self._step
        step.num_rows, step.table_stride = count, width
        step.query_start = query_start.ctypes.data
        step.block_tables = tables.ctypes.data
        tokens_of = tokens_by_adapter(rows) if self._adapters else None
        adapters = step_of(self._adapters, tokens_of) if tokens_of else None
        self._library.decoder_forward(
            self._decoder,
            self._tokens,
            self._step_pointer,
            None if adapters is None else ctypes.byref(adapters.step),
        )
        last = query_start[1 : count + 1] - 1
        if num_tokens > count:
            last -= np.array([row.drafts for row in rows])
        return self._hidden[:num_tokens], last

    def floats(self, hidden: Numbers) -> Floats:
        """See :meth:`gpu.cpu.model.CpuModel.floats`."""
        return hidden.astype(np.float32)

    def logits(self, hidden: Numbers, rows: npt.NDArray[np.integer] | None = None) -> Floats:
        """See :meth:`gpu.cpu.model.CpuModel.logits`."""
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
                queries = np.tile(norms["q_norm"], self.config.num_heads)
                keys = np.tile(norms["k_norm"], self.config.num_kv_heads)
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
            into = _ROUNDED.get(self.quantization, Format.BF16)
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


class _StepArrays:
    """The arrays that describe a step of up to ``most`` tokens, filled anew for each."""

    def __init__(self, most: int) -> None:
        self.tokens = np.zeros(most, dtype=np.int32)
        self.context_lens = np.zeros(most, dtype=np.int64)
        self.query_start = np.zeros(most + 1, dtype=np.int64)
        self.numbers = np.arange(most + 1, dtype=np.int64)
        """The ``query_start`` of rows of one token each."""


def _check_memory(given: int | None) -> None:
    if not given:
        raise ModelLoadError("no memory is left for the model: free some, or serve a smaller one")
