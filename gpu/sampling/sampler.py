"""Samples tokens from logits in torch, in the order of :mod:`trioserve.protocol.sampling`.

Everything works on whole batches. Greedy rows take one argmax. Rows with only a temperature take a
few elementwise passes and no sort; :mod:`gpu.sampling.truncation` has top_k, top_p and min_p.
Penalties, biases and masks touch only the tokens that they name, and an adjustment only the rows
that it changes.
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

# At lower temperatures 1 / temperature overflows; the other tokens have probability 0 even here.
LOWEST_TEMPERATURE = 1e-30


@attrs.frozen
class Sampled:
    """The output of a sampler for R rows.

    ``tokens`` is [R] int64 on the logits' device. It is ``NAN_LOGITS`` for a row with NaN in its
    logits, and ``NO_TOKEN`` for a row with all tokens masked; both are negative, and such a row has
    no log-probabilities. ``logprobs`` is [R] float32, NaN where not requested, or None if no row
    requests them. ``top`` has R entries, empty where not requested, or is None; tokens of
    probability 0 are left out.
    """

    tokens: Tensor
    logprobs: Tensor | None = None
    top: list[TopLogprobs] | None = None


class Sampler:
    """Samples tokens on one device, for a model with ``vocab_size`` tokens.

    With ``processed_logprobs`` the log-probabilities are those of the distribution that is sampled
    from, otherwise those of the unmodified logits.
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
        """Sample one token for every row.

        Args:
            logits: [R, vocab_size], float32 or a narrower float; overwritten.
            rows: the R rows.
            adjustment: the adjustment of the R rows, step 5.
        """
        params = [row.params for row in rows]
        asking = [i for i, p in enumerate(params) if p.logprobs >= 0]
        processed = {i for i in asking if self.processed_logprobs or params[i].processed_logprobs}
        logits = logits.float().contiguous()
        reported = logits[asking] if len(processed) < len(asking) else None
        self._adjust(logits, rows)
        if adjustment is not None:
            _apply(logits, adjustment)
        best = _argmax(logits)
        peaks = logits.gather(1, best[:, None])
        unusable = _handle_infinite_peaks(logits, peaks)
        random = [i for i, p in enumerate(params) if p.temperature > 0]
        if processed:
            adjusted = logits[asking]
            if reported is not None:
                raw = [k for k, i in enumerate(asking) if i not in processed]
                adjusted[raw] = reported[raw]
            reported = adjusted
        tokens = best
        if random:
            whole = len(random) == len(rows)
            scaled = logits if whole else logits[random]
            weights = _weights(
                scaled, peaks if whole else peaks[random], [params[i] for i in random]
            )
            drawn = _draw(weights, [rows[i] for i in random])
            tokens = drawn if whole else best.index_copy(0, self._index(random), drawn)
            of_random = {i: k for k, i in enumerate(random)}
            for k, i in enumerate(asking):
                if i in processed and i in of_random:
                    assert reported is not None
                    reported[k] = weights[of_random[i]].log()
        if unusable:
            reasons = torch.tensor(list(unusable.values()), device=tokens.device)
            tokens = tokens.index_copy(0, self._index(list(unusable)), reasons)
        if reported is None:
            return Sampled(tokens)
        return _with_logprobs(tokens, reported, asking, params)

    def _adjust(self, logits: Tensor, rows: Sequence[SamplerRow]) -> None:
        """Apply steps 2 to 4 in place: biases, penalties and masked stop ids."""
        biases, repetitions, counted, masks = (_TokenNumbers() for _ in range(4))
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
            # A repeated token is written more than once, with the same value.
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
class _TokenNumbers:
    """Numbers for (row, token) pairs, collected over the batch."""

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
        """Return indices into the flattened ``logits``, and the numbers, without unknown ids."""
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
    """Apply step 5 in place: the biases of logits processors, and masks."""
    if adjustment.bias is not None:
        logits.add_(adjustment.bias)
    if adjustment.bitmask is None:
        return
    words = adjustment.bitmask
    masked = np.flatnonzero((words != -1).any(axis=1))
    # NumPy is fastest at unpacking bytes.
    octets = words[masked].astype("<i4", copy=False).view(np.uint8)
    allowed = np.unpackbits(octets, axis=1, bitorder="little", count=logits.shape[1])
    banned = torch.from_numpy(allowed == 0).to(logits.device)
    for row, tokens in zip(masked.tolist(), banned, strict=True):
        logits[row].masked_fill_(tokens, -torch.inf)


def _argmax(logits: Tensor) -> Tensor:
    """Return the index of the first largest logit of each row, [R] int64; NaN is the largest."""
    if logits.device.type == "cpu":
        # NumPy's is several times faster than torch's on a CPU.
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(dim=1)


def _handle_infinite_peaks(logits: Tensor, peaks: Tensor) -> dict[int, int]:
    """Make rows with a logit of +inf finite: their +inf tokens share all probability.

    Return the rows without a token to sample, whose largest logit is NaN or -inf, with the negative
    number that replaces it.
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
    """Apply steps 7 to 10: return unnormalized probabilities [n, V], 1 for the most probable token.

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
    """Apply step 11: sample tokens [n] int64, each with a weight above 0.

    An exponential race gives each candidate an exponential random number divided by its weight. The
    smallest wins, with a probability proportional to its weight. The first race is between blocks
    of the vocabulary, the second between the tokens of the winner; the distribution is that of a
    single race, with a hundredth of the random numbers.

    Args:
        weights: [n, V] float32, at least one above 0 in each row.
        rows: the n rows; their seeds and positions give the random numbers.
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
    """Return the winners [n] int64 among candidates with ``weights`` [n, M] float64."""
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
    """Return the output with the log-probabilities of the rows ``asking`` that have a token.

    Args:
        tokens: [R] int64.
        reported: [len(asking), V], logits of the distributions that the log-probabilities are of.
        asking: indices of the rows that request log-probabilities.
        params: the parameters of all R rows.
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
    """Return the ``count`` most probable tokens of one row [V]; smaller ids first among equals."""
    candidates = ((row >= least) & (row > -torch.inf)).nonzero()[:, 0]
    values = (row[candidates] - normalizer).cpu().numpy()
    order = np.argsort(-values, kind="stable")[:count]
    return candidates.cpu().numpy()[order].astype(np.int32), values[order]
