"""Output tensors: the hidden states and logits that a request returns, as arrays of float32.

A hidden state is what the head takes: it comes after the last layer and the final norm. Logits are
raw: before biases, penalties, the temperature and masks. With P prompt tokens, E numbers in a
hidden state and V tokens in the vocabulary, a request has

- ``prompt_hidden_states`` [P, E] and ``context_logits`` [P, V], a row for each prompt token. Row i
  of the logits is about token i + 1.
- for each output of G tokens ``hidden_states`` [G, E] and ``generation_logits`` [G, V]. Token k was
  drawn from row k. So row 0 belongs to the prompt's last token, and the output's last token has
  none. If no token is asked for, ``hidden_states`` has one row nevertheless.

Rows come as pieces while they are computed. Whatever happens to the worker, the next row to compute
is the first that hasn't come.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.reports import (
    CONTEXT_LOGITS,
    GENERATION_LOGITS,
    HIDDEN_STATES,
    TensorPiece,
)
from trioserve.protocol.sampling import SamplingParams

PROMPT_STATES = "prompt_hidden_states"
NO_ROWS = -1

Floats = npt.NDArray[np.float32]
Arrays = dict[str, Floats]
"""Arrays by name."""


def tensor_bytes(
    params: SamplingParams, num_prompt: int, max_tokens: int, hidden_size: int, vocab_size: int
) -> dict[str, int]:
    """Return the most bytes of arrays for each field of ``params`` that asks for any."""
    n, prompt_too = params.n, params.return_hidden_states == "all"
    state, logits = 4 * hidden_size, 4 * vocab_size
    sizes = {
        "return_hidden_states": (n * max(max_tokens, 1) + prompt_too * num_prompt) * state,
        "return_context_logits": num_prompt * logits,
        "return_generation_logits": n * max_tokens * logits,
    }
    return {name: sizes[name] for name in params.returned_tensors}


def check_size(sizes: dict[str, int], most: int, prompts: str = "") -> int:
    """Return the bytes of ``sizes``, which are by field, together.

    Raises:
        InvalidRequest: they are more than ``most``; ``param`` is the field with the most.
    """
    total = sum(sizes.values())
    if total > most:
        name = max(sizes, key=sizes.__getitem__)
        others = ", ".join(each for each in sizes if each != name)
        together = f", {total} with {others}" if others else ""
        raise InvalidRequest(
            f"{name} asks for up to {sizes[name]} bytes of arrays{prompts}{together}: at most "
            f"{most} are returned (--max-output-tensor-bytes)",
            param=name,
        )
    return total


@attrs.define(eq=False)
class TensorRows:
    """The rows of one array, as far as they have come."""

    width: int
    most: int | None = None
    """All rows that there will be; None where the end isn't known."""
    count: int = attrs.field(init=False, default=0)
    """Number of rows that have come."""
    _pieces: list[Floats] = attrs.field(init=False, factory=list)

    @property
    def is_complete(self) -> bool:
        """True if no further row is taken."""
        return self.count == self.most

    def add(self, start: int, rows: Floats) -> None:
        """Take those of ``rows`` that are new; the first has the number ``start``.

        Raises:
            ValueError: rows before them are missing.
        """
        if start > self.count:
            raise ValueError(f"rows {self.count} to {start} are missing")
        stop = None if self.most is None else self.most - start
        new = rows[self.count - start : stop]
        if len(new):
            self._pieces.append(new)
            self.count += len(new)

    def forget(self) -> None:
        """Drop the numbers of all rows that have come; they still count as come."""
        self._pieces.clear()

    def array(self, most: int | None = None) -> Floats:
        """Return the rows as an array, at most ``most``."""
        if len(self._pieces) != 1:
            empty = np.empty((0, self.width), dtype=np.float32)
            self._pieces = [np.concatenate([empty, *self._pieces])]
        return self._pieces[0][:most]


@attrs.frozen
class MissingRows:
    """The first positions of which a sequence still has to give a hidden state, and logits of its
    prompt; :data:`NO_ROWS` for none.
    """

    states_from: int = NO_ROWS
    context_logits_from: int = NO_ROWS

    @property
    def first(self) -> int | None:
        """The first position that has to be computed for them; None if there is none."""
        positions = (self.states_from, self.context_logits_from)
        return min((each for each in positions if each != NO_ROWS), default=None)


NOTHING_MISSING = MissingRows()


@attrs.define(eq=False)
class RequestTensors:
    """The output tensors of one request so far."""

    num_prompt: int
    """Tokens of the prompt."""
    num_bytes: int
    """The most bytes that they can have."""
    _prompt: dict[str, TensorRows]
    _outputs: list[dict[str, TensorRows]]
    """Arrays of each output."""

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        num_prompt: int,
        *,
        hidden_size: int,
        vocab_size: int,
        num_bytes: int = 0,
    ) -> RequestTensors | None:
        """Return the record of what ``params`` ask for; None if that is nothing."""
        if not params.returned_tensors:
            return None
        prompt: dict[str, TensorRows] = {}
        if params.return_hidden_states == "all":
            prompt[PROMPT_STATES] = TensorRows(hidden_size, num_prompt)
        if params.return_context_logits:
            prompt[CONTEXT_LOGITS] = TensorRows(vocab_size, num_prompt)
        own: dict[str, int] = {}
        if params.return_hidden_states:
            own[HIDDEN_STATES] = hidden_size
        if params.return_generation_logits:
            own[GENERATION_LOGITS] = vocab_size
        outputs = [{name: TensorRows(own[name]) for name in own} for _ in range(params.n)]
        return cls(num_prompt, num_bytes, prompt, outputs)

    def missing(self, index: int, *, leads: bool) -> MissingRows:
        """Return what output ``index`` has to give next.

        It gives the rows of the prompt, too, if it ``leads`` the others.
        """
        states = context = NO_ROWS
        if HIDDEN_STATES in self._outputs[index]:
            states = self.num_prompt - 1 + self._outputs[index][HIDDEN_STATES].count
        for name, rows in self._prompt.items() if leads else ():
            if rows.is_complete:
                continue
            if name == PROMPT_STATES:
                states = min(states, rows.count)
            else:
                context = rows.count
        return MissingRows(states, context)

    def check(self, index: int, piece: TensorPiece) -> None:
        """Demand that ``piece`` of output ``index`` can be added.

        Raises:
            ValueError: it wasn't asked for, has another width, or rows before it are missing.
        """
        rows = self._rows_of(index, piece.name)
        read_rows(piece, rows.width)
        if piece.start < 0:
            raise ValueError(f"{piece.name} begin at {piece.start}")
        first = 0 if piece.name == CONTEXT_LOGITS else self.num_prompt - 1
        if piece.start > first + rows.count:
            raise ValueError(f"{piece.name} {first + rows.count} to {piece.start} are missing")

    def check_end(self, index: int, name: str, piece: TensorPiece | None, end: int) -> None:
        """Demand that the rows of ``name`` reach position ``end`` - 1 with ``piece``.

        Raises:
            ValueError: they don't.
        """
        rows = self._rows_of(index, name)
        last = self.num_prompt - 1 + rows.count
        if piece is not None:
            last = max(last, piece.start + len(read_rows(piece, rows.width)))
        if last != end:
            raise ValueError(f"{name} end before position {last}, where {end} was due")

    def due(self, index: int) -> list[str]:
        """Return the names of the pieces that come with each token of output ``index``."""
        return list(self._outputs[index])

    def add(self, index: int, piece: TensorPiece) -> None:
        """Take a piece that output ``index`` gave; rows that have come before are left out.

        Raises:
            ValueError: as in :meth:`check`.
        """
        rows = read_rows(piece, self._rows_of(index, piece.name).width)
        prompt = PROMPT_STATES if piece.name == HIDDEN_STATES else piece.name
        # Rows of the prompt have the number of their position.
        if prompt in self._prompt and piece.start <= self._prompt[prompt].count:
            self._prompt[prompt].add(piece.start, rows)
        if piece.name in self._outputs[index]:
            first = self.num_prompt - 1
            self._outputs[index][piece.name].add(
                max(piece.start - first, 0), rows[max(first - piece.start, 0) :]
            )

    def forget_rows(self) -> None:
        """Drop the numbers, because another process keeps them."""
        for arrays in (self._prompt, *self._outputs):
            for rows in arrays.values():
                rows.forget()

    @property
    def num_bytes_so_far(self) -> int:
        """Bytes of the rows that have come."""
        arrays = (rows for each in (self._prompt, *self._outputs) for rows in each.values())
        return sum(4 * rows.width * rows.count for rows in arrays)

    def of_prompt(self) -> Arrays:
        """Return the arrays of the prompt, complete once an output has a token."""
        return {name: rows.array() for name, rows in self._prompt.items()}

    def of_output(self, index: int, num_tokens: int) -> Arrays:
        """Return the arrays of an output that has ended with ``num_tokens`` tokens."""
        found = self._outputs[index]
        most = {HIDDEN_STATES: max(num_tokens, 1), GENERATION_LOGITS: num_tokens}
        return {name: rows.array(most[name]) for name, rows in found.items()}

    def _rows_of(self, index: int, name: str) -> TensorRows:
        arrays = self._prompt if name == CONTEXT_LOGITS else self._outputs[index]
        if name not in arrays:
            raise ValueError(f"no {name} were asked for")
        return arrays[name]


def read_rows(piece: TensorPiece, width: int) -> Floats:
    """Return the rows [n, ``width``] of a piece.

    Raises:
        ValueError: they have another width.
    """
    return np.frombuffer(piece.rows, dtype="<f4").reshape(-1, width)
