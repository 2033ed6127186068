"""Logits to tokens, in the order of operations that :mod:`trioserve.protocol.sampling` writes down.

Everything works on whole batches. A batch of plain greedy rows costs one argmax; rows with a
temperature alone cost a few elementwise passes and no sort; for what cuts a distribution see
:mod:`gpu.sampling.truncation`. Penalties, biases and masks touch only the tokens that they name,
and an adjustment only the rows that it changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu.sampling.adjustments import Adjustment
from gpu.sampling.philox import Purpose, uniforms
from gpu.sampling.sampler_io import SamplerRow, TopLogprobs
from gpu.sampling.truncation import BLOCK, block_sums, drop_below, truncate
from trioserve.protocol.sampling import NAN_LOGITS, NO_TOKEN, SamplerParams
from trioserve.protocol.wire import ints

# Below this every other token's probability is 0 in float32 anyway, and 1 / temperature overflows.
LOWEST_TEMPERATURE = 1e-30


@attrs.frozen
class Sampled:
    """The draws of R rows.

    ``tokens`` is [R] int64 on the logits' device, negative for a row with no token to draw: its
    logits hold NaN (``NAN_LOGITS``), or nothing is left unmasked (``NO_TOKEN``). Such a row has no
    log-probabilities. ``logprobs`` is [R] float32, NaN where not asked for, or None if no row
    asked. ``top`` has R entries, empty where not asked for, or is None if no row asked; tokens of
    probability 0 are left out of it.
    """

    tokens: Tensor
    logprobs: Tensor | None = None
    top: list[TopLogprobs] | None = None


class Sampler:
    """Draws tokens for a model with ``vocab_size`` tokens, on one device.

    With ``processed_logprobs`` the log-probabilities reported are of the distribution that was
    drawn from, else of the model's own.
    """

    def __init__(
        self, vocab_size: int, device: torch.device | str, *, processed_logprobs: bool = False
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.processed_logprobs = processed_logprobs

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: Sequence[SamplerRow], adjustment: Adjustment | None = None
    ) -> Sampled:
        """Draw one token for every row.

        Args:
            logits: [R, vocab_size], float32 or a narrower float; overwritten.
            rows: R rows.
            adjustment: of the R rows, what is done to their logits in step 5.
        """
        params = [row.params for row in rows]
        asking = [i for i, p in enumerate(params) if p.logprobs >= 0]
        logits = logits.float().contiguous()
        reported = logits[asking] if asking and not self.processed_logprobs else None
        self._adjust(logits, rows)
        if adjustment is not None:
            _apply(logits, adjustment)
        best = _argmax(logits)
        peaks = logits.gather(1, best[:, None])
        unusable = _handle_infinite_peaks(logits, peaks)
        random = [i for i, p in enumerate(params) if p.temperature > 0]
        if asking and reported is None:
            reported = logits[asking]
        tokens = best
        if random:
            whole = len(random) == len(rows)
            scaled = logits if whole else logits[random]
            weights = _weights(
                scaled, peaks if whole else peaks[random], [params[i] for i in random]
            )
            drawn = _draw(weights, [rows[i] for i in random])
            tokens = drawn if whole else best.index_copy(0, self._index(random), drawn)
            if asking and self.processed_logprobs:
                assert reported is not None
                of_random = {i: k for k, i in enumerate(random)}
                for k, i in enumerate(asking):
                    if i in of_random:
                        reported[k] = weights[of_random[i]].log()
        if unusable:
            reasons = torch.tensor(list(unusable.values()), device=tokens.device)
            tokens = tokens.index_copy(0, self._index(list(unusable)), reasons)
        if reported is None:
            return Sampled(tokens)
        return _with_logprobs(tokens, reported, asking, params)

    def _adjust(self, logits: Tensor, rows: Sequence[SamplerRow]) -> None:
        """Steps 2 to 4: biases, penalties and masked stop ids, in place."""
        biases, repetitions, counted, masks = _Touched(), _Touched(), _Touched(), _Touched()
        for i, row in enumerate(rows):
            p = row.params
            if p.logit_bias:
                biases.add(i, list(p.logit_bias), list(p.logit_bias.values()))
            if p.repetition_penalty != 1:
                repetitions.add(i, row.tokens, p.repetition_penalty)
            if (p.frequency_penalty or p.presence_penalty) and len(row.tokens) > row.prompt_length:
                tokens, counts = np.unique(row.tokens[row.prompt_length :], return_counts=True)
                counted.add(i, tokens, -(p.frequency_penalty * counts + p.presence_penalty))
            if p.stop_ids and len(row.tokens) - row.prompt_length < p.min_tokens:
                masks.add(i, ints(p.stop_ids), -np.inf)
        flat = logits.view(-1)
        if biases:
            where, amounts = biases.on(logits)
            flat[where] = (flat[where].double() + amounts).float()
        if repetitions:
            # A token that occurs twice is written twice, with the same value.
            where, penalties = repetitions.on(logits)
            old = flat[where].double()
            flat[where] = torch.where(old > 0, old / penalties, old * penalties).float()
        if counted:
            where, amounts = counted.on(logits)
            flat[where] = (flat[where].double() + amounts).float()
        if masks:
            where, _ = masks.on(logits)
            flat[where] = -torch.inf

    def _index(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, device=self.device)


@attrs.define
class _Touched:
    """(row, token) pairs with a number for each, gathered over the batch."""

    rows: list[npt.NDArray[np.int64]] = attrs.field(factory=list)
    tokens: list[npt.NDArray[np.int64]] = attrs.field(factory=list)
    numbers: list[npt.NDArray[np.float64]] = attrs.field(factory=list)

    def add(self, row: int, tokens: npt.ArrayLike, numbers: npt.ArrayLike) -> None:
        ids = np.asarray(tokens, dtype=np.int64)
        self.tokens.append(ids)
        self.rows.append(np.full(len(ids), row, dtype=np.int64))
        self.numbers.append(np.broadcast_to(np.asarray(numbers, dtype=np.float64), ids.shape))

    def __bool__(self) -> bool:
        return bool(self.rows)

    def on(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Positions in the flattened ``logits``, and the numbers; unknown ids are left out."""
        vocab_size = logits.shape[1]
        tokens = np.concatenate(self.tokens)
        known = tokens < vocab_size
        where = (np.concatenate(self.rows) * vocab_size + tokens)[known]
        numbers = np.concatenate(self.numbers)[known]
        return (
            torch.from_numpy(where).to(logits.device),
            torch.from_numpy(numbers).to(logits.device),
        )


def _apply(logits: Tensor, adjustment: Adjustment) -> None:
    """Step 5: what the logits processors and the masks want, in place."""
    if adjustment.bias is not None:
        logits.add_(adjustment.bias)
    if adjustment.bitmask is None:
        return
    words = adjustment.bitmask
    masked = np.flatnonzero((words != -1).any(axis=1))
    # Unpacking bits byte by byte is what NumPy does fastest.
    octets = words[masked].astype("<i4", copy=False).view(np.uint8)
    allowed = np.unpackbits(octets, axis=1, bitorder="little", count=logits.shape[1])
    banned = torch.from_numpy(allowed == 0).to(logits.device)
    for row, tokens in zip(masked.tolist(), banned, strict=True):
        logits[row].masked_fill_(tokens, -torch.inf)


def _argmax(logits: Tensor) -> Tensor:
    """[R] int64: the first largest logit of each row; a NaN counts as the largest."""
    if logits.device.type == "cpu":
        # Several times faster than torch's on a CPU.
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(dim=1)


def _handle_infinite_peaks(logits: Tensor, peaks: Tensor) -> dict[int, int]:
    """Make rows finite that have +inf as largest logit (their +inf tokens share all probability).

    Returns the rows that have no token to draw, with what stands for it: their largest logit is
    NaN or -inf.
    """
    unusable: dict[int, int] = {}
    if bool(peaks.isfinite().all()):
        return unusable
    for i in (~peaks.isfinite()).nonzero()[:, 0].tolist():
        if peaks[i] == torch.inf:
            logits[i] = torch.where(logits[i] == torch.inf, 0.0, -torch.inf)
        else:
            unusable[i] = NO_TOKEN if peaks[i] == -torch.inf else NAN_LOGITS
        peaks[i] = 0.0
    return unusable


def _weights(logits: Tensor, peaks: Tensor, params: list[SamplerParams]) -> Tensor:
    """Steps 7 to 10: [n, V] probabilities up to a factor per row, 1 for the most probable token.

    Args:
        logits: [n, V] float32, overwritten.
        peaks: [n, 1], each row's largest logit.
    """
    device, vocab_size = logits.device, logits.shape[1]
    temperatures = [max(p.temperature, LOWEST_TEMPERATURE) for p in params]
    scaled = logits.sub_(peaks)
    if any(temperature != 1 for temperature in temperatures):
        scaled.div_(torch.tensor(temperatures, device=device)[:, None])
    weights = scaled.exp()
    cut = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1]
    if cut:
        truncate(scaled, weights, params, cut)
    if any(p.min_p > 0 for p in params):
        least = torch.tensor([p.min_p for p in params], device=device)
        drop_below(weights, weights, least)
    return weights


def _draw(weights: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Step 11: two exponential races, between the blocks of the vocabulary and within the winner.

    A race gives every candidate an exponential number of rate 1, divided by its weight; the
    smallest wins, with a probability proportional to its weight. Racing by blocks first costs a
    hundredth of the random numbers and draws from the same distribution.

    Args:
        weights: [n, V] float32, at least one above 0 in each row.
        rows: the n rows; the random numbers are made of their seeds and positions.

    Returns:
        [n] int64 tokens, each of a weight above 0.
    """
    sums = block_sums(weights)
    blocks = np.arange(sums.shape[1])
    block = _race(sums, rows, Purpose.BLOCK, blocks)
    ids = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)
    vocab_size = weights.shape[1]
    inside = weights.gather(1, ids.clamp(max=vocab_size - 1)).double()
    inside.masked_fill_(ids >= vocab_size, 0.0)
    winner = _race(inside, rows, Purpose.TOKEN, ids.cpu().numpy())
    return ids.gather(1, winner[:, None])[:, 0]


def _race(
    weights: Tensor, rows: Sequence[SamplerRow], purpose: Purpose, lanes: npt.NDArray[np.int64]
) -> Tensor:
    """[n] int64: the winners among the candidates of ``weights``, [n, M] float64."""
    numbers = uniforms(
        [row.params.seed for row in rows],
        [len(row.tokens) for row in rows],
        [row.params.sequence_index for row in rows],
        purpose,
        lanes,
    )
    exponentials = torch.from_numpy(-np.log1p(-numbers)).to(weights.device)
    times = torch.where(weights > 0, exponentials / weights, torch.inf)
    return times.argmin(dim=1)


def _with_logprobs(
    tokens: Tensor, reported: Tensor, asking: list[int], params: list[SamplerParams]
) -> Sampled:
    """Return the result with the log-probabilities of the rows ``asking``, where they have a token.

    Args:
        reported: [len(asking), V], logits of the distributions to report on.
    """
    asked = torch.tensor(asking, device=tokens.device)
    normalizers = reported.logsumexp(dim=1)
    logprobs = torch.full(tokens.shape, torch.nan, device=tokens.device)
    drawn = tokens[asked]
    chosen = reported.gather(1, drawn.clamp(min=0)[:, None])[:, 0]
    logprobs[asked] = torch.where(drawn >= 0, chosen - normalizers, torch.nan)
    nothing = (np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))
    top: list[TopLogprobs] = [nothing] * len(params)
    most = min(max(params[i].logprobs for i in asking), reported.shape[1])
    if most > 0:
        least = reported.topk(most, dim=1).values
        for k, (i, token) in enumerate(zip(asking, drawn.tolist(), strict=True)):
            count = min(params[i].logprobs, most)
            if count > 0 and token >= 0:
                top[i] = _top_logprobs(reported[k], least[k, count - 1], normalizers[k], count)
    return Sampled(tokens, logprobs, top)


def _top_logprobs(row: Tensor, least: Tensor, normalizer: Tensor, count: int) -> TopLogprobs:
    """Return the ``count`` most probable tokens of one row [V]; the first of equals comes first."""
    candidates = ((row >= least) & (row > -torch.inf)).nonzero()[:, 0]
    values = (row[candidates] - normalizer).cpu().numpy()
    order = np.argsort(-values, kind="stable")[:count]
    return candidates.cpu().numpy()[order].astype(np.int32), values[order]
