"""The sampler on the device: steps that follow each other, what it refuses, what it takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu.cuda.sampler import DeviceSampler, scratch_bytes, top_lists
from gpu.kernels.emulation import EmulatedLoader
from tests.support.device_draws import reference_draw, row
from trioserve.protocol.sampling import SamplerParams


def sampler(**changes: object) -> DeviceSampler:
    options: dict[str, object] = {
        "vocab_size": 300,
        "num_slots": 3,
        "max_rows": 4,
        "max_logprobs": 5,
        **changes,
    }
    if "history" not in options:
        options["history"] = torch.zeros(3, 20, dtype=torch.int32)
    return DeviceSampler(EmulatedLoader(), **options)  # type: ignore[arg-type]


def test_a_step_draws_behind_the_tokens_of_the_steps_before() -> None:
    """Addresses stay, what stands there changes: what a replayed graph relies on."""
    history = torch.zeros(3, 20, dtype=torch.int32)
    drawing = sampler(history=history)
    params = SamplerParams(seed=4, frequency_penalty=2.0, repetition_penalty=1.3, top_p=0.95)
    tokens = [5, 6, 7]
    history[2, :3] = torch.tensor(tokens)
    drawing.open(2, params, 2)
    logits = torch.empty(1, 300)
    slots, lengths = torch.tensor([2], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        model = torch.randn(1, 300, generator=generator) * 4
        logits.copy_(model)
        drawing.launch(logits, slots, lengths)
        each = row(tokens, 2)
        each.params = params
        tokens.append(int(reference_draw(model, [each]).tokens[0]))
        assert history[2, : 4 + step].tolist() == tokens
        lengths += 1


def test_a_slot_opened_again_has_nothing_of_the_last() -> None:
    drawing = sampler()
    drawing.open(0, SamplerParams(logit_bias={7: 100.0}, temperature=0.0), 0)
    zeros = torch.zeros(1, dtype=torch.int32)
    drawing.launch(torch.zeros(1, 300), zeros, zeros)
    assert drawing.outputs.tokens[0] == 7
    drawing.open(0, SamplerParams(logit_bias={8: 100.0}, temperature=0.0), 0)
    drawing.launch(torch.zeros(1, 300), zeros, zeros)
    assert drawing.outputs.tokens[0] == 8


def test_ids_past_the_vocabulary_are_passed_over() -> None:
    drawing = sampler()
    bias = {7: 3.0, 300: 90.0, 10**9: 90.0}
    params = SamplerParams(logit_bias=bias, stop_ids=[7, 300, 400], min_tokens=1, temperature=0.0)
    drawing.open(0, params, 0)
    zeros = torch.zeros(1, dtype=torch.int32)
    drawing.launch(torch.zeros(1, 300), zeros, zeros)
    assert drawing.outputs.tokens[0] == 0


def test_logits_in_wider_rows() -> None:
    """Draw from a head padded to more columns than the vocabulary has tokens."""
    drawing = sampler()
    wide = torch.full((4, 307), 99.0)
    model = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    wide[:, :300] = model
    for slot in range(3):
        drawing.open(slot, SamplerParams(seed=slot), 0)
    slots = torch.tensor([0, 1, 2, -1], dtype=torch.int32)
    drawing.launch(wide[:, :300], slots, torch.zeros(4, dtype=torch.int32))
    rows = [row(seed=seed) for seed in range(3)]
    wanted = reference_draw(model[:3], rows).tokens
    assert drawing.outputs.tokens[:3].tolist() == wanted.tolist()
    assert (wide[:, 300:] == 99).all()


def test_a_full_history_takes_no_more() -> None:
    history = torch.zeros(3, 20, dtype=torch.int32)
    drawing = sampler(history=history)
    drawing.open(0, SamplerParams(temperature=0.0), 1)
    logits = torch.zeros(1, 300)
    logits[0, 9] = 1.0
    slots = torch.zeros(1, dtype=torch.int32)
    drawing.launch(logits, slots, torch.full((1,), 20, dtype=torch.int32))
    assert drawing.outputs.tokens[0] == 9
    assert not history.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 10**6}, "a vocabulary of 1000000 tokens"),
        ({"vocab_size": 5000, "max_logprobs": 2000}, "at most 1024 .--max-logprobs"),
        ({"history": torch.zeros(3, 20)}, "int32"),
        ({"history": torch.zeros(20, 3, dtype=torch.int32).T}, "contiguous"),
        ({"num_slots": 4}, "4 slots"),
        ({"history": torch.zeros(3, 1 << 20, dtype=torch.int32)}, "up to 1048574"),
    ],
)
def test_what_the_kernels_are_not_made_for_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(**changes)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("bias", torch.zeros(2, 300)),
        ("bias", torch.zeros(1, 300, dtype=torch.float64)),
        ("bias", torch.zeros(1, 600)[:, ::2]),
        ("bitmask", torch.zeros(1, 9, dtype=torch.int32)),
        ("bitmask", torch.zeros(1, 10, dtype=torch.int64)),
    ],
)
def test_masks_that_the_kernels_would_misread_are_refused(name: str, tensor: torch.Tensor) -> None:
    drawing = sampler()
    drawing.open(0, SamplerParams(), 0)
    zeros = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"a {name} of .* is wanted"):
        drawing.launch(torch.zeros(1, 300), zeros, zeros, **{name: tensor})


def test_scratch_bytes_are_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for name in ("empty", "zeros"):
        allocate = getattr(torch, name)

        def counting(*args: object, allocate: object = allocate, **named: object) -> torch.Tensor:
            tensor: torch.Tensor = allocate(*args, **named)  # type: ignore[operator]
            sizes.append(tensor.nbytes)
            return tensor

        monkeypatch.setattr(torch, name, counting)
    history = torch.ones(7, 20, dtype=torch.int32)
    sampler(vocab_size=4101, num_slots=7, max_rows=9, history=history, max_logprobs=6)
    wanted = scratch_bytes(vocab_size=4101, num_slots=7, max_rows=9, max_logprobs=6)
    assert sum(sizes) == wanted


def test_top_lists_end_at_the_last_token() -> None:
    ids = np.array([[4, 2, -1], [9, 9, 9], [1, 2, 3]], dtype=np.int32)
    values = np.array([[-1, -2, np.nan], [0, 0, 0], [-1, -2, -3]], dtype=np.float32)
    lists = top_lists(ids, values, [2, -1, 3])
    assert [each.tolist() for each, _ in lists] == [[4, 2], [], [1, 2, 3]]
    assert [each.tolist() for _, each in lists] == [[-1, -2], [], [-1, -2, -3]]
