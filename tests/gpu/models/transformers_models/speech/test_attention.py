"""The audio of slots: what they bring, and how long it is kept."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from gpu.models.transformers_models.speech.attention import HeardAudio, Layers
from gpu.slots import Row, SlotTable
from trioserve.protocol.embeddings import EmbeddingRows, NumberFormat
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import OpenSlot, Plan, from_ints

STATES, WIDTH = 3, 2


class Projector:
    """A projection that notes the states that it is given."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def __call__(self, states: torch.Tensor) -> Layers:
        self.given.append(states.float())
        return [(states, states)]


def table() -> SlotTable:
    return SlotTable(
        num_pages=8,
        page_size=4,
        max_model_len=8,
        vocab_size=10,
        embedding_width=STATES * WIDTH,
    )


def row(slots: SlotTable, number: int, value: float, kind: NumberFormat = "float32") -> Row:
    """Open a slot in place of the one of that number; return its row. It brings ``value``."""
    numbers = np.full(STATES * WIDTH, value, np.float32)
    data = numbers if kind == "float32" else numbers.astype(ml_dtypes.bfloat16)
    opened = OpenSlot(
        slot=number,
        generation=sum(each.generation for each in slots) + 1,
        tokens=from_ints([1, 2]),
        prompt_length=2,
        computed=1,
        pages=from_ints([number]),
        sampler=SamplerParams(),
        embeddings=[EmbeddingRows(start=0, rows=data.tobytes(), number_format=kind)],
    )
    closed = [number] if number in [each.number for each in slots] else []
    plan = Plan(
        number=1,
        opened=[opened],
        closed=from_ints(closed),
        row_slots=from_ints([number]),
        row_counts=from_ints([1]),
    )
    (found,) = slots.apply(plan)
    return found


def test_slots_with_the_same_audio_share_it_and_closed_ones_keep_it_while_there_is_room() -> None:
    slots, project = table(), Projector()
    heard = HeardAudio(project, STATES, WIDTH, 2)
    first, second = row(slots, 0, 1.5), row(slots, 1, 1.5)
    one, other = heard.of([first, second], slots)
    assert one is other
    first.slot.advance(2)  # and forgets what it brought
    assert not first.slot.embeddings
    assert heard.of([first], slots) == [one]
    third = row(slots, 1, -2.0, "bfloat16")
    heard.of([third], slots)
    assert [float(each[0, 0]) for each in project.given] == [1.5, -2.0]
    assert project.given[1].shape == (STATES, WIDTH)
    again = row(slots, 0, -2.0, "bfloat16")
    heard.of([again], slots)
    assert len(heard) == 2
    heard.of([row(slots, 1, 1.5)], slots)
    assert (len(project.given), len(heard)) == (2, 2)
    heard.of([row(slots, 1, 4.0)], slots)
    assert (len(project.given), len(heard)) == (3, 2)


def test_a_slot_without_audio_hears_zeros() -> None:
    slots, project = table(), Projector()
    opened = row(slots, 0, 1.0)
    opened.slot.embeddings = ()
    HeardAudio(project, STATES, WIDTH, 1).of([opened], slots)
    assert torch.equal(project.given[0], torch.zeros(STATES, WIDTH))
