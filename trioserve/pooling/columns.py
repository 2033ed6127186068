"""Texts for an encoder, as they travel between processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError
from trioserve.text.encoder_tokenizer import EncodedText

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@attrs.frozen(eq=False)
class Columns:
    """N texts of T tokens in all: ``ids`` and ``type_ids`` [T] int32, ``ends`` [N + 1] int64.

    Text i has the tokens ``ends[i]`` to ``ends[i + 1] - 1``.
    """

    ids: Ints
    type_ids: Ints
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, texts: Sequence[EncodedText]) -> Columns:
        """Return the columns of at least one text."""
        return cls.joined(
            (np.asarray(text.ids, np.int32), np.asarray(text.type_ids, np.int32)) for text in texts
        )

    @classmethod
    def joined(cls, texts: Iterable[tuple[Ints, Ints]]) -> Columns:
        """Return the columns of at least one text, given the ids and type ids of each."""
        ids, type_ids = zip(*texts, strict=True)
        return cls._with_lengths(
            np.concatenate(ids), np.concatenate(type_ids), np.array([len(each) for each in ids])
        )

    @classmethod
    def from_message(cls, message: Any) -> Columns:
        """Return the columns in a map made by :meth:`message`."""
        ids, type_ids = wire.ints(message["ids"]), wire.ints(message["type_ids"])
        return cls._with_lengths(ids, type_ids, wire.ints(message["lengths"]))

    @classmethod
    def _with_lengths(cls, ids: Ints, type_ids: Ints, lengths: npt.NDArray[Any]) -> Columns:
        return cls(ids, type_ids, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))

    def message(self) -> dict[str, bytes]:
        """Return the argument of the worker's call ``encode``."""
        return {
            "ids": wire.from_ints(self.ids),
            "type_ids": wire.from_ints(self.type_ids),
            "lengths": wire.from_ints(np.diff(self.ends)),
        }

    def __len__(self) -> int:
        return len(self.ends) - 1

    def text(self, index: int) -> tuple[Ints, Ints]:
        """Return the ids and type ids of one text."""
        part = slice(int(self.ends[index]), int(self.ends[index + 1]))
        return self.ids[part], self.type_ids[part]


def vectors_of(column: object, count: int) -> Floats:
    """Return the float32 column [count, dim] that answers ``count`` texts.

    Raises:
        EngineError: The column doesn't fit.
    """
    if not isinstance(column, bytes) or not column or len(column) % (4 * count):
        raise EngineError(f"the worker's answer to {count} texts makes no sense")
    return wire.floats(column).reshape(count, -1)
