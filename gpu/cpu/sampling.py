"""Tokens from logits by compiled kernels: every row in one pass or few.

The same tokens come out as of :mod:`gpu.sampling.sampler`, up to near-ties of rounding:
exponentials and sums may differ in the last bit. A row is computed by one thread and by itself, so
its token doesn't depend on its batch.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.cpu.library import Library, no_room_for
from gpu.cpu.model import Floats
from gpu.sampling.adjustments import Adjustment
from gpu.sampling.drawn import Drawn
from gpu.sampling.sampler_io import SamplerRow, TopLogprobs
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import ints

_DRAW = np.dtype(
    [
        ("seed", np.uint64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("position", np.uint32),
        ("index", np.uint32),
        ("change", np.int32),
        ("keeps_logits", np.int32),
    ],
    align=True,
)
"""``Draw`` of sampling.h."""
_REPORT = np.dtype([("row", np.int32), ("count", np.int32)])
"""``Report`` of sampling.h."""


class _Change(ctypes.Structure):
    """``Change`` of changes.h."""

    _fields_ = (
        *((f"{name}_penalty", c_double) for name in ("repetition", "frequency", "presence")),
        *(("tokens", c_void_p), ("num_tokens", c_int64), ("prompt_length", c_int64)),
        *(("biased", c_void_p), ("biases", c_void_p), ("num_biased", c_int64)),
        *(("masked", c_void_p), ("num_masked", c_int64)),
    )


class _Adjustment(ctypes.Structure):
    """``Adjustment`` of changes.h."""

    _fields_ = (("bias", c_void_p), ("words", c_void_p), ("words_stride", c_int64))


class CompiledSampler:
    """:class:`gpu.cpu.model.CpuSampler`, with ``threads`` threads.

    ``library`` is that of :func:`gpu.cpu.library.load_library`. With ``processed_logprobs`` the
    log-probabilities reported are of the distribution that was drawn from, else of the model's own.

    Raises:
        ModelLoadError: there is no memory for it, or no room for another thread.
    """

    def __init__(
        self,
        library: Library,
        vocab_size: int,
        threads: int,
        *,
        processed_logprobs: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self._processed_logprobs = processed_logprobs
        _declare(library)
        self._library = library
        self._handle = library.sampler_create(vocab_size, threads)
        if not self._handle:
            raise ModelLoadError(no_room_for(threads))
        weakref.finalize(self, library.sampler_destroy, self._handle)

    def sample(
        self, logits: Floats, rows: Sequence[SamplerRow], adjustment: Adjustment | None = None
    ) -> Drawn:
        """See :meth:`gpu.cpu.model.CpuSampler.sample`."""
        assert logits.flags.c_contiguous
        tokens = self._draw(logits, rows, adjustment or Adjustment())
        params = [row.params for row in rows]
        asking = [i for i, p in enumerate(params) if p.logprobs >= 0]
        if not asking:
            return Drawn(tokens=tokens)
        # The draw has changed the logits only where that is what is reported.
        return _with_logprobs(tokens, logits, asking, self._report(logits, asking, params))

    def _draw(
        self,
        logits: Floats,
        rows: Sequence[SamplerRow],
        adjustment: Adjustment,
    ) -> npt.NDArray[np.int32]:
        """Return the tokens [R]; logits of rows that report their last distribution become it."""
        changes: list[_Change] = []
        kept: list[npt.NDArray[Any]] = []
        draws = np.array(
            [
                (
                    p.seed,
                    p.top_p,
                    p.temperature,
                    p.min_p,
                    min(p.top_k, self.vocab_size),
                    len(row.tokens),
                    p.sequence_index,
                    _add_change(row, changes, kept),
                    (self._processed_logprobs or p.processed_logprobs) and p.logprobs >= 0,
                )
                for row in rows
                for p in (row.params,)
            ],
            dtype=_DRAW,
        )
        tokens = np.empty(len(rows), dtype=np.int32)
        bias, words = adjustment.bias, adjustment.bitmask
        self._library.sampler_draw(
            self._handle,
            logits.ctypes.data,
            len(rows),
            draws.ctypes.data,
            (_Change * len(changes))(*changes),
            ctypes.byref(
                _Adjustment(
                    bias=None if bias is None else bias.data_ptr(),
                    words=None if words is None else words.ctypes.data,
                    words_stride=0 if words is None else words.shape[1],
                )
            ),
            tokens.ctypes.data,
        )
        return tokens

    def _report(self, logits: Floats, asking: list[int], params: list[SamplerParams]) -> _Reported:
        most = min(max(params[i].logprobs for i in asking), self.vocab_size)
        asked = np.array([(i, min(params[i].logprobs, most)) for i in asking], dtype=_REPORT)
        found = _Reported(len(asking), most)
        self._library.sampler_report(
            self._handle,
            logits.ctypes.data,
            asked.ctypes.data,
            len(asking),
            most,
            found.normalizers.ctypes.data,
            found.ids.ctypes.data,
            found.logprobs.ctypes.data,
            found.counts.ctypes.data,
        )
        return found


def _add_change(row: SamplerRow, changes: list[_Change], kept: list[npt.NDArray[Any]]) -> int:
    """Return the number of what steps 2 to 4 do to ``row``, now one of ``changes``; -1 for nothing.

    ``kept`` has the arrays that it points to.
    """
    p = row.params
    penalizes = p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
    masks = bool(p.stop_ids) and len(row.tokens) - row.prompt_length < p.min_tokens
    if not (penalizes or masks or p.logit_bias):
        return -1
    change = _Change(repetition_penalty=1)
    if penalizes:
        tokens = np.ascontiguousarray(row.tokens, dtype=np.int32)
        kept.append(tokens)
        change.tokens, change.num_tokens = tokens.ctypes.data, len(tokens)
        change.prompt_length = row.prompt_length
        change.repetition_penalty = p.repetition_penalty
        change.frequency_penalty = p.frequency_penalty
        change.presence_penalty = p.presence_penalty
    if p.logit_bias:
        biased = np.array(list(p.logit_bias), dtype=np.int32)
        biases = np.array(list(p.logit_bias.values()), dtype=np.float64)
        kept += biased, biases
        change.biased, change.biases = biased.ctypes.data, biases.ctypes.data
        change.num_biased = len(biased)
    if masks:
        masked = ints(p.stop_ids)
        kept.append(masked)
        change.masked, change.num_masked = masked.ctypes.data, len(masked)
    changes.append(change)
    return len(changes) - 1


class _Reported:
    """The report on n rows; ``counts`` [n] says how many of ``most`` columns hold tokens."""

    def __init__(self, number: int, most: int) -> None:
        self.normalizers = np.empty(number, dtype=np.float32)
        self.ids = np.empty((number, most), dtype=np.int32)
        self.logprobs = np.empty((number, most), dtype=np.float32)
        self.counts = np.empty(number, dtype=np.int32)


def _with_logprobs(
    tokens: npt.NDArray[np.int32],
    reported: Floats,
    asking: list[int],
    report: _Reported,
) -> Drawn:
    """Return the result with the log-probabilities of the rows ``asking`` that have a token."""
    drawn = tokens[asking]
    logprobs = np.full(len(tokens), np.nan, dtype=np.float32)
    with np.errstate(invalid="ignore"):  # rows without a token
        chosen = reported[asking, np.maximum(drawn, 0)] - report.normalizers
    logprobs[asking] = np.where(drawn >= 0, chosen, np.nan)
    nothing = (np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))
    top: list[TopLogprobs] = [nothing] * len(tokens)
    for k, i in enumerate(asking):
        count = report.counts[k] if drawn[k] >= 0 else 0
        if count:
            top[i] = (report.ids[k, :count], report.logprobs[k, :count])
    return Drawn(tokens=tokens, logprobs=logprobs, top=top)


def _declare(library: Library) -> None:
    library.sampler_create.restype = c_void_p
    library.sampler_create.argtypes = [c_int64, c_int32]
    library.sampler_destroy.argtypes = [c_void_p]
    library.sampler_draw.argtypes = [c_void_p, c_void_p, c_int64, *[c_void_p] * 4]
    library.sampler_report.argtypes = [
        *(c_void_p, c_void_p, c_void_p, c_int64, c_int64),
        *(c_void_p, c_void_p, c_void_p, c_void_p),
    ]
    for name in ("destroy", "draw", "report"):
        getattr(library, f"sampler_{name}").restype = None
