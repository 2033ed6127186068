"""Packs sequences of all lengths into one batch without padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.model_files import EncoderConfig

Ints = npt.NDArray[np.integer]


@attrs.frozen
class LengthGroup:
    """``count`` consecutive sequences of ``length`` tokens each."""

    count: int
    length: int


@attrs.frozen(eq=False)
class Packed:
    """N sequences of T tokens in total, concatenated, with equal lengths next to each other.

    ``ids``, ``type_ids`` and ``positions`` are [T] int64. ``ends`` is [N + 1] int64: sequence i has
    the tokens ``ends[i]`` to ``ends[i + 1] - 1``.
    """

    ids: npt.NDArray[np.int64]
    type_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    groups: tuple[LengthGroup, ...]


def check_inputs(config: EncoderConfig, ids: Sequence[Ints], type_ids: Sequence[Ints]) -> None:
    """Refuse ids out of range, which would make a GPU's context unusable, and wrong lengths.

    Raises:
        ValueError: an id is out of range, or a sequence's length doesn't fit.
    """
    if len(ids) != len(type_ids):
        raise ValueError(f"{len(ids)} sequences of ids and {len(type_ids)} of types")
    for sequence, types in zip(ids, type_ids, strict=True):
        if not 0 < len(sequence) <= config.max_length or len(types) != len(sequence):
            raise ValueError(
                f"a sequence of {len(sequence)} tokens with {len(types)} types, where the model "
                f"takes 1 to {config.max_length} with as many"
            )
        if sequence.min() < 0 or sequence.max() >= config.vocab_size:
            raise ValueError(f"an id outside of the vocabulary of {config.vocab_size}")
        if types.min() < 0 or types.max() >= max(config.type_vocab_size, 1):
            raise ValueError(f"a type outside of the model's {config.type_vocab_size}")


def split(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield batches of at most ``max_tokens`` tokens, as indices of sequences, shortest first.

    A longer sequence makes a batch of its own.
    """
    batch: list[int] = []
    num_tokens = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and num_tokens + lengths[index] > max_tokens:
            yield batch
            batch, num_tokens = [], 0
        batch.append(index)
        num_tokens += lengths[index]
    if batch:
        yield batch


def pack(padding_idx: int | None, ids: Sequence[Ints], type_ids: Sequence[Ints]) -> Packed:
    """Pack at least one sequence; sequences of equal length must be next to each other.

    See :attr:`~trioserve.model_files.EncoderConfig.padding_idx`.
    """
    lengths = [len(sequence) for sequence in ids]
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    all_ids = np.concatenate(ids).astype(np.int64)
    return Packed(
        ids=all_ids,
        type_ids=np.concatenate(type_ids).astype(np.int64),
        positions=_positions(padding_idx, all_ids, ends),
        ends=ends,
        groups=tuple(
            LengthGroup(len(list(equal)), length) for length, equal in itertools.groupby(lengths)
        ),
    )


def _positions(
    padding_idx: int | None, ids: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return positions [T]: BERT counts all tokens from 0, RoBERTa only non-padding ones."""
    starts = np.repeat(ends[:-1], np.diff(ends))
    if padding_idx is None:
        return np.arange(len(ids), dtype=np.int64) - starts
    counted = ids != padding_idx
    running = np.concatenate(([0], np.cumsum(counted)))
    return np.where(counted, running[1:] - running[starts], 0) + padding_idx
