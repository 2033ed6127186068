"""Drawing with :class:`gpu.cuda.sampler.DeviceSampler` in tests, and how close a draw was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from gpu.cuda.sampler import DeviceSampler, top_lists
from gpu.kernels import KernelLoader
from gpu.sampling.philox import Purpose, uniforms
from gpu.sampling.sampler import Sampled, Sampler
from gpu.sampling.sampler_io import SamplerRow, TopLogprobs
from tests.kernels.memory import place
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import ints

Floats = npt.NDArray[np.float64]
NEAR_TIE = 1e-5
"""Relative margin below which rounding may swap two candidates."""


@attrs.frozen(eq=False)
class Drawn:
    """The outputs of one step on the host, and the state it left."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    top: list[TopLogprobs]
    history: npt.NDArray[np.int32]
    marks: npt.NDArray[np.int32]


def row(
    tokens: Sequence[int] | npt.NDArray[np.integer] = (), prompt: int = 0, **fields: Any
) -> SamplerRow:
    """Return a row with parameters ``fields`` and the first ``prompt`` tokens as its prompt."""
    return SamplerRow(SamplerParams(**fields), np.asarray(tokens, dtype=np.int32), prompt)


def device_draw(
    loader: KernelLoader,
    logits: torch.Tensor,
    rows: Sequence[SamplerRow | None],
    *,
    processed: bool = False,
    max_logprobs: int = 8,
    bias: torch.Tensor | None = None,
    bitmask: torch.Tensor | None = None,
) -> Drawn:
    """Run one step over ``logits`` [R, V], in slots that differ from the rows' numbers.

    A row that is None is padding.
    """
    count, vocab_size = logits.shape
    longest = max((len(each.tokens) for each in rows if each), default=0)
    history = torch.full((count + 1, longest + 1), -7, dtype=torch.int32)
    slots = np.full(count, -1, dtype=np.int32)
    for i, each in enumerate(rows):
        if each:
            slots[i] = (i * 7 + 3) % count if count % 7 else i + 1
            history[slots[i], : len(each.tokens)] = torch.from_numpy(np.asarray(each.tokens))
    history = place(history, loader)
    sampler = DeviceSampler(
        loader,
        vocab_size=vocab_size,
        num_slots=count + 1,
        max_rows=count,
        history=history,
        max_logprobs=max_logprobs,
        processed_logprobs=processed,
    )
    for i, each in enumerate(rows):
        if each:
            sampler.open(int(slots[i]), each.params, each.prompt_length)
    lengths = np.array([len(each.tokens) if each else 0 for each in rows], dtype=np.int32)
    sampler.outputs.tokens.fill_(-9)
    sampler.launch(
        place(logits, loader),
        place(torch.from_numpy(slots), loader),
        place(torch.from_numpy(lengths), loader),
        bias=None if bias is None else place(bias, loader),
        bitmask=None if bitmask is None else place(bitmask, loader),
    )
    out = sampler.outputs
    asked = [each.params.logprobs if each else -1 for each in rows]
    return Drawn(
        tokens=out.tokens.cpu().numpy(),
        logprobs=out.logprobs.cpu().numpy(),
        top=top_lists(out.top_ids.cpu().numpy(), out.top_values.cpu().numpy(), asked),
        history=history.cpu().numpy()[slots],
        marks=sampler.marks.cpu().numpy(),
    )


def reference_draw(
    logits: torch.Tensor, rows: Sequence[SamplerRow], *, processed: bool = False
) -> Sampled:
    """Run the same step by torch's sampler."""
    sampler = Sampler(logits.shape[1], "cpu", processed_logprobs=processed)
    return sampler.sample(logits.clone(), rows)


def adjusted(logits: Floats, each: SamplerRow) -> Floats:
    """Steps 2 to 4 of trioserve.protocol.sampling, one token at a time."""
    params, tokens = each.params, [int(token) for token in each.tokens]
    output, x = tokens[each.prompt_length :], logits.astype(np.float32)
    for token, amount in params.logit_bias.items():
        x[token] = np.float32(float(x[token]) + amount)
    for token in set(tokens):
        old, penalty = float(x[token]), params.repetition_penalty
        x[token] = np.float32(old / penalty if old > 0 else old * penalty)
    for token in set(output):
        amount = params.frequency_penalty * output.count(token) + params.presence_penalty
        x[token] = np.float32(float(x[token]) - amount)
    if len(output) < params.min_tokens:
        x[ints(params.stop_ids)] = -np.inf
    result: Floats = x.astype(np.float64)
    return result


def exact_draw(logits: Floats, each: SamplerRow) -> tuple[int, float]:
    """Return the token by exact arithmetic, and the smallest relative margin of its decisions."""
    params, x = each.params, adjusted(logits, each)
    order = np.argsort(-x, kind="stable")
    if params.temperature == 0:
        return int(order[0]), np.inf
    x = (x - x[order[0]]) / max(params.temperature, 1e-30)
    weights, margins = np.exp(x), [np.inf]
    kept = np.ones(len(x), dtype=bool)
    if 0 < params.top_k < len(x):
        least = x[order[params.top_k - 1]]
        kept = x >= least
        margins += [least - dropped for dropped in x[~kept][:1] if least - dropped < NEAR_TIE]
        margins.append(float((least - x[~kept]).min(initial=np.inf)))
    if params.top_p < 1:
        masses = np.cumsum(np.where(kept, weights, 0.0)[order])
        wanted = params.top_p * masses[-1]
        last = int((masses < wanted).sum())
        kept[order[last + 1 :]] = False
        margins.append(float(np.abs(masses - wanted).min() / masses[-1]))
    if params.min_p > 0:
        margins.append(float(np.abs(weights / params.min_p - 1).min()))
        kept &= weights >= params.min_p
    weights = np.where(kept, weights, 0.0)
    padded = np.append(weights, np.zeros(-len(weights) % 128)).reshape(-1, 128)
    block, margin = _race(padded.sum(axis=1), each, Purpose.BLOCK, 0)
    token, other = _race(padded[block], each, Purpose.TOKEN, block * 128)
    return block * 128 + token, min(*margins, margin, other)


def _race(weights: Floats, each: SamplerRow, purpose: Purpose, first: int) -> tuple[int, float]:
    lanes = first + np.arange(len(weights))
    params = each.params
    numbers = uniforms([params.seed], [len(each.tokens)], [params.sequence_index], purpose, lanes)
    with np.errstate(divide="ignore"):
        times = np.where(weights > 0, -np.log1p(-numbers[0]) / weights, np.inf)
    soonest = np.sort(times)
    return int(times.argmin()), float(soonest[1] / soonest[0] - 1) if len(times) > 1 else np.inf


def assert_same_tokens(
    logits: torch.Tensor, rows: Sequence[SamplerRow], tokens: npt.ArrayLike, wanted: npt.ArrayLike
) -> None:
    """``tokens`` are the ``wanted`` ones except where exact arithmetic sees a near tie."""
    for i, (token, want) in enumerate(zip(np.asarray(tokens), np.asarray(wanted), strict=True)):
        if token != want:
            exact, margin = exact_draw(logits[i].double().numpy(), rows[i])
            assert margin < NEAR_TIE, (i, rows[i].params, token, want, exact, margin)


def assert_same_top(
    actual: Sequence[TopLogprobs], wanted: Sequence[TopLogprobs], tolerance: float = 2e-5
) -> None:
    """Assert equal tokens with equal log-probabilities; near ties may have changed places."""
    for (ids, values), (wanted_ids, wanted_values) in zip(actual, wanted, strict=True):
        assert len(ids) == len(wanted_ids)
        np.testing.assert_allclose(values, wanted_values, rtol=tolerance, atol=tolerance)
        for position in np.nonzero(ids != wanted_ids)[0]:
            near = np.abs(wanted_values - values[position]) < 2 * tolerance
            assert ids[position] in wanted_ids[near] or near[-1], (ids, wanted_ids)
