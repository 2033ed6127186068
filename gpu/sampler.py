"""Logits to tokens, in the order of operations that :mod:`trioserve.sampling` writes down.

Everything works on whole batches. A batch of plain greedy rows costs one argmax; rows with a
temperature alone cost a few elementwise passes and no sort. ``top_k`` and ``top_p`` both come down
to one threshold per row, found among the largest few values where those suffice and in a full sort
only where they don't. Penalties, biases and masks touch only the tokens that they name.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from gpu.philox import Purpose, uniforms
from trioserve.sampling import SamplerParams

__all__ = [
    "LOWEST_TEMPERATURE",
    "Sampled",
    "Sampler",
    "SamplerRow",
    "TopLogprobs",
    "UnusableLogits",
]

TopLogprobs = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Token ids and their log-probabilities, most probable first."""

# How many of the largest values are looked at, in turn, before all of them are sorted.
_FEW = (128, 2048)
# Tokens in a block of the draw's first stage. Part of what a seed means: it never changes.
_BLOCK = 128
# Below this every other token's probability is 0 in float32 anyway, and 1 / temperature overflows.
LOWEST_TEMPERATURE = 1e-30


class UnusableLogits(Exception):
    """A row has no token to draw: its logits hold NaN, or nothing is left unmasked.

    Attributes:
        row: the index of that row.
    """

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row}: the logits hold NaN or leave no token to draw")
        self.row = row


@attrs.define
class SamplerRow:
    """One sequence that is to get one token.

    ``tokens`` is the prompt and the output so far, its first ``prompt_length`` tokens the prompt; a
    NumPy array is the cheapest. The new token's position is ``len(tokens)``.
    """

    params: SamplerParams
    tokens: Sequence[int] | npt.NDArray[np.integer]
    prompt_length: int


@attrs.frozen
class Sampled:
    """What was drawn for R rows.

    ``tokens`` is [R] int64 on the logits' device. ``logprobs`` is [R] float32, NaN where not asked
    for, or None if no row asked. ``top`` has R entries, empty where not asked for, or is None if no
    row asked; tokens of probability 0 are left out of it.
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
    def sample(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Sampled:
        """Draw one token for every row.

        Args:
            logits: [R, vocab_size], float32 or a narrower float; overwritten.
            rows: R rows.

        Raises:
            UnusableLogits: a row has no token to draw.
        """
        params = [row.params for row in rows]
        asking = [i for i, p in enumerate(params) if p.logprobs >= 0]
        logits = logits.float().contiguous()
        reported = logits[asking] if asking and not self.processed_logprobs else None
        self._adjust(logits, rows)
        best = _argmax(logits)
        peaks = logits.gather(1, best[:, None])
        _handle_infinite_peaks(logits, peaks)
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
                masks.add(i, p.stop_ids, -np.inf)
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


def _argmax(logits: Tensor) -> Tensor:
    """[R] int64: the first largest logit of each row; a NaN counts as the largest."""
    if logits.device.type == "cpu":
        # Several times faster than torch's on a CPU.
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(dim=1)


def _handle_infinite_peaks(logits: Tensor, peaks: Tensor) -> None:
    """Make rows whose largest logit is +inf finite (their +inf tokens share all probability).

    Raises:
        UnusableLogits: a row's largest logit is NaN or -inf.
    """
    if bool(peaks.isfinite().all()):
        return
    for i in (~peaks.isfinite()).nonzero()[:, 0].tolist():
        if peaks[i] != torch.inf:
            raise UnusableLogits(i)
        logits[i] = torch.where(logits[i] == torch.inf, 0.0, -torch.inf)
        peaks[i] = 0.0


def _weights(logits: Tensor, peaks: Tensor, params: list[SamplerParams]) -> Tensor:
    """Steps 6 to 9: [n, V] probabilities up to a factor per row, 1 for the most probable token.

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
        _truncate(scaled, weights, params, cut)
    if any(p.min_p > 0 for p in params):
        least = torch.tensor([p.min_p for p in params], device=device)
        _drop_below(weights, weights, least)
    return weights


def _truncate(scaled: Tensor, weights: Tensor, params: list[SamplerParams], cut: list[int]) -> None:
    """Steps 7 and 8: zero the weights that top_k and top_p drop in the rows ``cut``, in place."""
    rows, vocab_size = scaled.shape
    device = scaled.device
    top_k = torch.tensor([min(p.top_k, vocab_size) for p in params], device=device)
    top_k[top_k <= 0] = vocab_size
    top_p = torch.tensor([p.top_p for p in params], device=device, dtype=torch.float64)
    totals = _block_sums(weights).sum(dim=1)
    threshold = torch.full((rows,), -torch.inf, device=device)
    ties = torch.full((rows,), vocab_size, device=device)
    pending = torch.tensor(cut, device=device)
    for width in (*(few for few in _FEW if few < vocab_size), vocab_size):
        everything = len(pending) == rows
        values = _largest(scaled if everything else scaled[pending], width)
        found = _find_cut(values, vocab_size, totals[pending], top_k[pending], top_p[pending])
        threshold[pending] = found.threshold
        ties[pending] = found.ties
        pending = pending[~found.sure]
        if not len(pending):
            break
    _drop_below(weights, scaled, threshold)
    for i in (ties < vocab_size).nonzero()[:, 0].tolist():
        equal = (scaled[i] == threshold[i]).nonzero()[:, 0]
        weights[i, equal[int(ties[i]) :]] = 0.0


def _drop_below(weights: Tensor, values: Tensor, least: Tensor) -> None:
    """Zero the weights [n, V] whose ``values`` are below their row's ``least`` [n], in place."""
    # A comparison straight to float and a product are a tenth of masked_fill_'s time on a CPU.
    weights.mul_(torch.ge(values, least[:, None], out=torch.empty_like(values)))


def _largest(x: Tensor, width: int) -> Tensor:
    """The ``width`` largest values of each row of ``x`` [n, V], descending."""
    if width < x.shape[1]:
        return x.topk(width, dim=1).values
    if x.device.type == "cpu":
        # NumPy sorts values alone with vector instructions; torch always carries indices along.
        return torch.from_numpy(np.sort(x.numpy(), axis=1)).flip(1)
    return x.sort(dim=1, descending=True).values


@attrs.frozen
class _Cut:
    """For each row: keep what is above ``threshold`` and the first ``ties`` tokens equal to it.

    A row that isn't ``sure`` needs more values than were given.
    """

    threshold: Tensor
    ties: Tensor
    sure: Tensor


def _find_cut(
    values: Tensor, vocab_size: int, totals: Tensor, top_k: Tensor, top_p: Tensor
) -> _Cut:
    """Where top_k and top_p cut, from the largest values alone.

    Args:
        values: [n, W] scaled logits, descending, the first being 0.
        totals: [n] float64, the sum of exp over the whole row.
        top_k: [n], from 1 to the vocabulary's size, which means off.
        top_p: [n] float64, above 0; 1 means off.
    """
    width = values.shape[1]
    complete = width == vocab_size
    last = values[:, -1]
    kth = values.gather(1, top_k.clamp(max=width)[:, None] - 1)[:, 0]
    k_on, p_on = top_k < vocab_size, top_p < 1

    kept_by_k = (values >= kth[:, None]) | ~k_on[:, None]
    mass = torch.where(kept_by_k, values.exp().double(), 0.0).cumsum(dim=1)
    whole = mass[:, -1] if complete else torch.where(k_on, mass[:, -1], totals)
    before = (mass < (top_p * whole)[:, None]).sum(dim=1)
    reached = before < width
    pth = values.gather(1, before.clamp(max=width - 1)[:, None])[:, 0]

    threshold = torch.where(p_on, pth, kth)
    wanted = before + 1 - (values > threshold[:, None]).sum(dim=1)
    present = (values == threshold[:, None]).sum(dim=1)
    ends_inside = (last < threshold) | complete
    ties = torch.where(p_on & ~((present == wanted) & ends_inside), wanted, vocab_size)
    # Values equal to the last one may go on outside of `values`, and would count for top_p's whole.
    k_sure = ~k_on | ((top_k <= width) & (~p_on | (kth > last)))
    sure = (k_sure & (~p_on | reached)) | complete
    return _Cut(threshold, ties, sure)


def _block_sums(weights: Tensor) -> Tensor:
    """[n, ceil(V / _BLOCK)] float64: the sums of successive blocks of each row."""
    padding = -weights.shape[1] % _BLOCK
    padded = functional.pad(weights, (0, padding)) if padding else weights
    return padded.view(len(weights), -1, _BLOCK).sum(dim=2).double()


def _draw(weights: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Step 10: two exponential races, between the blocks of the vocabulary and within the winner.

    A race gives every candidate an exponential number of rate 1, divided by its weight; the
    smallest wins, with a probability proportional to its weight. Racing by blocks first costs a
    hundredth of the random numbers and draws from the same distribution.

    Args:
        weights: [n, V] float32, at least one above 0 in each row.
        rows: the n rows, whose seeds and positions the random numbers are made of.

    Returns:
        [n] int64 tokens, each of a weight above 0.
    """
    sums = _block_sums(weights)
    blocks = np.arange(sums.shape[1])
    block = _race(sums, rows, Purpose.BLOCK, blocks)
    ids = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
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
    """The result with the log-probabilities of the rows ``asking``.

    Args:
        reported: [len(asking), V], logits of the distributions to report on.
    """
    asked = torch.tensor(asking, device=tokens.device)
    normalizers = reported.logsumexp(dim=1)
    logprobs = torch.full(tokens.shape, torch.nan, device=tokens.device)
    chosen = reported.gather(1, tokens[asked][:, None])[:, 0]
    logprobs[asked] = chosen - normalizers
    nothing = (np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))
    top: list[TopLogprobs] = [nothing] * len(params)
    most = min(max(params[i].logprobs for i in asking), reported.shape[1])
    if most > 0:
        least = reported.topk(most, dim=1).values
        for k, i in enumerate(asking):
            count = min(params[i].logprobs, most)
            if count > 0:
                top[i] = _top_logprobs(reported[k], least[k, count - 1], normalizers[k], count)
    return Sampled(tokens, logprobs, top)


def _top_logprobs(row: Tensor, least: Tensor, normalizer: Tensor, count: int) -> TopLogprobs:
    """The ``count`` most probable tokens of one row [V]; the first of equals comes first."""
    candidates = ((row >= least) & (row > -torch.inf)).nonzero()[:, 0]
    values = (row[candidates] - normalizer).cpu().numpy()
    order = np.argsort(-values, kind="stable")[:count]
    return candidates.cpu().numpy()[order].astype(np.int32), values[order]
