"""An earlier occurrence of a sequence's last tokens, and what finds one."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Occurrence(NamedTuple):
    """A substring of indexed tokens that is also a sequence's suffix."""

    length: int
    """Number of its tokens; 0 if there is none."""
    end: int
    """Position of the token that followed it."""


NOWHERE = Occurrence(0, 0)


class SuffixIndex(Protocol):
    """Finds earlier occurrences of the suffix of a sequence that grows."""

    @property
    def match(self) -> Occurrence:
        """The occurrence found after the last token; :data:`NOWHERE` if there is none."""
        ...

    def append(self, token: int) -> None:
        """Append ``token`` to the sequence."""
        ...
