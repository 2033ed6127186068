"""Embeddings in place of a prompt's tokens, and the ids by which the prefix cache knows them.

A prompt's ids have :data:`PLACEHOLDER` at each position with an embedding. The prefix cache
compares ids, so it gets others for these positions: a :class:`ContentIds` gives equal ids to equal
contents and to no others.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.protocol.embeddings import NUMPY_DTYPES, EmbeddingRows, ImageGrid, NumberFormat
from trioserve.protocol.errors import InvalidRequest

PLACEHOLDER = 0
"""Token at positions with an embedding; any token of the vocabulary would do."""
FIRST_CONTENT_ID = 1 << 30
"""The first id that is no token of any vocabulary."""
END_OF_CONTENT_IDS = 1 << 31
"""The end of what fits a column of int32."""
SPEECH = "speech"
"""Kind of a span that is the audio of a transcript."""
PREFIX = "prefix"
"""Kind of a span with the keys and values of an adapter's virtual tokens: see
:class:`trioserve.protocol.wire.OpenSlot`."""
SPAN_ROWS = 16
"""Embeddings that are named together: prompts share their pages as far as such spans are equal."""
MAX_KNOWN_CONTENTS = 1 << 16
"""Contents whose ids are remembered, about 20 MiB. An older one gets new ids if it comes again."""

_FORMATS = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


def _as_embeddings(given: object) -> npt.NDArray[np.generic]:
    """Return the array [T, E] that ``given`` is, contiguous; float64 becomes float32."""
    if hasattr(given, "detach") and hasattr(given, "float"):
        given = given.detach().float().cpu()  # A tensor, whose bfloat16 NumPy may not know.
    try:
        rows = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"embeddings must be an array: {error}", param="prompt") from None
    if rows.dtype == np.float64:
        rows = rows.astype(np.float32)
    if rows.dtype not in _FORMATS:
        formats = ", ".join(_FORMATS.values())
        raise InvalidRequest(
            f"embeddings must be numbers in one of {formats}, not {rows.dtype}", param="prompt"
        )
    if rows.ndim != 2 or not rows.size:
        raise InvalidRequest(
            "embeddings must be an array [tokens, hidden size] with at least one row, "
            f"not of the shape {list(rows.shape)}",
            param="prompt",
        )
    return np.ascontiguousarray(rows)


@attrs.frozen(eq=False)
class EmbeddingsPrompt:
    """Embeddings to be continued, in place of those of tokens.

    ``embeddings`` is [T, E] in float32, float16 or bfloat16 (``ml_dtypes``), where E is the model's
    hidden size. PyTorch's tensors are taken, too, as float32. They must be finite; the worker
    checks that no more.
    """

    embeddings: npt.NDArray[np.generic] = attrs.field(converter=_as_embeddings)

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def width(self) -> int:
        """Number of columns, E."""
        return int(self.embeddings.shape[1])

    @property
    def placeholder(self) -> int:
        """Token at its positions."""
        return PLACEHOLDER

    def marks(self, index: int) -> list[int]:
        """Return the marks of piece number ``index`` of a prompt, in place of ids."""
        return [_mark(index)] * len(self)

    def spans(self, start: int, first: int, count: int) -> list[EmbeddedSpan]:
        """Return the spans of ``count`` embeddings, from the one numbered ``first`` on.

        They take about 1 ms for 1 MiB.

        Args:
            start: Position of the first one in the prompt.
            first: Its number here.
            count: Number of embeddings.
        """
        kind = _FORMATS[self.embeddings.dtype]
        rows = self.embeddings[first : first + count]
        return [
            EmbeddedSpan.of(start + place, rows[place : place + SPAN_ROWS], kind)
            for place in range(0, count, SPAN_ROWS)
        ]


@attrs.frozen(eq=False, kw_only=True)
class EmbeddedMedia:
    """The embeddings of an image or another medium, among tokens that stand for it."""

    kind: str
    """``image``, ``audio`` or ``video``."""
    token_ids: list[int]
    """Tokens in its place, of which those that are :attr:`placeholder` have embeddings."""
    placeholder: int
    digest: bytes
    """Digest of its content."""
    rows: EmbeddingRows
    """Embeddings of all placeholders, in order."""
    grid: ImageGrid | None = None
    """Grid of the placeholders, which are neighbors, from 0 on; None if it doesn't matter."""
    token: str = ""
    """Text that stands for it in a prompt; empty for that of the placeholder."""
    is_together: bool = False
    """True if each of the placeholders sees all others, so that one step computes them."""
    text: str = ""
    """Text of :attr:`token_ids`, which is encoded together with what stands beside it; empty if the
    tokens stay as they are."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_placeholders(self) -> int:
        """Number of tokens with an embedding."""
        return self.token_ids.count(self.placeholder)

    def marks(self, index: int) -> list[int]:
        """See :meth:`EmbeddingsPrompt.marks`; the other tokens stay."""
        ids = self.token_ids.copy()
        self.put_marks(index, ids)
        return ids

    def put_marks(self, index: int, ids: list[int]) -> None:
        """Put marks of piece number ``index`` in place of the first placeholders in ``ids``."""
        place = -1
        for _ in range(self.num_placeholders):
            place = ids.index(self.placeholder, place + 1)
            ids[place] = _mark(index)

    def spans(self, start: int, first: int, count: int) -> list[EmbeddedSpan]:
        """See :meth:`EmbeddingsPrompt.spans`; there is one, because media are whole."""
        width = len(self.rows.rows) // self.num_placeholders
        part = f"{first} {count} {self.grid}".encode() + self.digest
        return [
            EmbeddedSpan(
                start=start,
                stop=start + count,
                digest=hashlib.blake2b(part, digest_size=16).digest(),
                rows=self.rows.rows[first * width : (first + count) * width],
                number_format=self.rows.number_format,
                kind=self.kind,
                grid=None if self.grid is None else attrs.evolve(self.grid, start=start),
                is_together=self.is_together,
            )
        ]


@attrs.frozen(eq=False, kw_only=True)
class SpeechPrompt:
    """Tokens that begin a transcript, and the audio that is transcribed.

    The whole audio stands at the position of the first token, as if it were its embedding. So
    pages are shared by prompts with the same audio, and by no others.
    """

    token_ids: tuple[int, ...]
    digest: bytes
    """Digest of the audio, 16 bytes."""
    states: EmbeddingRows = attrs.field(repr=False)
    """Encoder states of the audio, [S, E]."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def width(self) -> int:
        """Numbers of all encoder states."""
        return len(self.states.rows) // NUMPY_DTYPES[self.states.number_format].itemsize

    @property
    def placeholder(self) -> int:
        """The first token."""
        return self.token_ids[0]

    def marks(self, index: int) -> list[int]:
        """See :meth:`EmbeddingsPrompt.marks`; the tokens behind the first one stay."""
        return [_mark(index), *self.token_ids[1:]]

    def spans(self, start: int, first: int, count: int) -> list[EmbeddedSpan]:
        """See :meth:`EmbeddingsPrompt.spans`; there is one, at the first token."""
        assert (first, count) == (0, 1)
        return [
            EmbeddedSpan(
                start=start,
                stop=start + 1,
                digest=self.digest,
                rows=self.states.rows,
                number_format=self.states.number_format,
                kind=SPEECH,
            )
        ]


Embedded = EmbeddingsPrompt | EmbeddedMedia | SpeechPrompt
"""A piece of a prompt that has embeddings."""


def _mark(index: int) -> int:
    return -1 - index


@attrs.frozen(kw_only=True)
class EmbeddedSpan:
    """Positions of a prompt from ``start`` to before ``stop``, with embeddings."""

    start: int
    stop: int
    digest: bytes
    """Digest of the embeddings and the grid, 16 bytes."""
    rows: bytes
    """[stop - start, E], contiguous and little-endian."""
    number_format: NumberFormat
    kind: str = ""
    """Kind of the medium that they come from; empty if a caller gave them. For :data:`SPEECH`, all
    later positions need them, too. Those of :data:`PREFIX` are no embeddings."""
    grid: ImageGrid | None = None
    """Grid of an image or a video whose tokens the positions are; None if it doesn't matter."""
    is_together: bool = False
    """True if each position sees all others, so that one step computes those that aren't cached."""

    @classmethod
    def of(
        cls, start: int, rows: npt.NDArray[np.generic], number_format: NumberFormat
    ) -> EmbeddedSpan:
        """Return the span of ``rows`` [n, E] from ``start`` on."""
        data = rows.tobytes()
        hashed = hashlib.blake2b(f"{number_format} {rows.shape}\0".encode(), digest_size=16)
        hashed.update(data)
        return cls(
            start=start,
            stop=start + len(rows),
            digest=hashed.digest(),
            rows=data,
            number_format=number_format,
        )

    def after(self, computed: int) -> EmbeddingRows:
        """Return the embeddings for a worker that has computed ``computed`` tokens of the prompt.

        At least one position must be left, or all later ones need them.
        """
        skipped = 0 if self.kind == SPEECH else max(computed - self.start, 0)
        width = len(self.rows) // (self.stop - self.start)
        return EmbeddingRows(
            start=self.start + skipped,
            rows=self.rows[skipped * width :],
            number_format=self.number_format,
        )


def take_marks(ids: list[int], given: Sequence[Embedded]) -> list[EmbeddedSpan]:
    """Replace the marks of ``given`` in ``ids`` by placeholders, and return the spans there."""
    spans: list[EmbeddedSpan] = []
    column = np.array(ids) if given else None
    for index, each in enumerate(given):
        places = np.flatnonzero(column == _mark(index))
        first = 0
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
            start, count = int(run[0]), len(run)
            ids[start : start + count] = [each.placeholder] * count
            spans += each.spans(start, first, count)
            first += count
    return sorted(spans, key=lambda span: span.start)


def rows_after(spans: Sequence[EmbeddedSpan], computed: int) -> list[EmbeddingRows]:
    """Return the embeddings that tokens behind the first ``computed`` ones need."""
    return [
        span.after(computed)
        for span in spans
        if span.kind == SPEECH or (span.stop > computed and span.kind != PREFIX)
    ]


def prefix_after(spans: Sequence[EmbeddedSpan], cached: int) -> list[EmbeddingRows]:
    """Return the keys and values of virtual tokens behind the first ``cached`` tokens."""
    return [span.after(cached) for span in spans if span.kind == PREFIX and span.stop > cached]


def count_uncut(spans: Sequence[EmbeddedSpan], start: int, count: int, most: int) -> int:
    """Return about ``count`` tokens from ``start`` on that don't end within what comes together.

    It is 0 if the next ones come together and are more than ``most``.
    """
    stop = start + count
    for span in spans:
        if span.is_together and span.start < stop < span.stop:
            if span.start > start:
                return span.start - start
            return span.stop - start if span.stop - start <= most else 0
    return count


def grids_of(spans: Sequence[EmbeddedSpan]) -> list[ImageGrid]:
    """Return the grids of images and videos among ``spans``."""
    return [span.grid for span in spans if span.grid is not None]


@attrs.define(eq=False)
class ContentIds:
    """The ids of embedded contents: equal for equal contents, and no token's.

    All positions of a span have the same id. Prompts that agree in their ids up to a position agree
    in their embeddings, too, since every span is in a prompt as a whole.

    Args:
        end: End of the ids. Behind it they begin anew: nothing that is cached may have one of the
            ids before, and no request may have stayed open since the last time.
    """

    end: int = END_OF_CONTENT_IDS
    _next: int = attrs.field(init=False, default=FIRST_CONTENT_ID)
    _known: OrderedDict[bytes, int] = attrs.field(init=False, factory=OrderedDict)
    """Ids by the digests of contents, that of longest ago first."""

    def has_room(self, spans: Sequence[EmbeddedSpan]) -> bool:
        """Return False if the ids have to begin anew before these spans get theirs."""
        return self._next + len(spans) <= self.end

    def begin_anew(self) -> None:
        """Forget all contents, and give the first ids again."""
        self._known.clear()
        self._next = FIRST_CONTENT_ID

    def named(self, prompt_ids: Sequence[int], spans: Sequence[EmbeddedSpan]) -> list[int]:
        """Return ``prompt_ids`` with the ids of the contents of ``spans`` in their places."""
        ids = list(prompt_ids)
        for span in spans:
            ids[span.start : span.stop] = [self._id_of(span.digest)] * (span.stop - span.start)
        return ids

    def _id_of(self, digest: bytes) -> int:
        known = self._known.get(digest)
        if known is not None:
            self._known.move_to_end(digest)
            return known
        number = self._known[digest] = self._next
        self._next += 1
        if len(self._known) > MAX_KNOWN_CONTENTS:
            self._known.popitem(last=False)
        return number
