"""Cases of the sampler: all launches from logits to a token in the device's history.

The tokens must be those of :class:`gpu.sampling.sampler.Sampler`, which computes in torch
operations with the same random numbers; only near ties may fall otherwise. The least that any
sampler moves is one pass over the logits. (In a model they were written just before: a few rows are
still in the cache.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import torch

from bench.kernels.case import Case, Contestant, Contestants, Setting, flashinfer_module, poison
from bench.kernels.roofline import sampling
from bench.kernels.targets import OURS, Target
from gpu.cuda.sampler import DeviceSampler
from gpu.sampling.sampler import Sampler
from gpu.sampling.sampler_io import SamplerRow
from gpu.sampling.truncation import truncate
from trioserve.protocol.sampling import SamplerParams

_VOCABULARY = 128256
_HISTORY = 1000
_PROMPT = 600
# Probabilities fall with the rank to this power, as those of a model do that knows what comes.
_ZIPF = 1.4
# Where a draw nearly ties, another order of additions decides it otherwise.
_NEAR_TIES = 0.01
# Normal numbers as logits: no few tokens hold the probability.
_FLAT = "top_p 0.9 flat"
_VARIANTS = {
    "greedy": SamplerParams(temperature=0.0),
    "temperature": SamplerParams(temperature=0.8),
    "top_k 50": SamplerParams(temperature=0.8, top_k=50),
    "top_p 0.9": SamplerParams(temperature=0.8, top_p=0.9),
    _FLAT: SamplerParams(top_p=0.9),
    "top_k 50 top_p 0.9": SamplerParams(top_k=50, top_p=0.9, min_p=0.01),
    "penalties": SamplerParams(repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1),
    "top_p 0.9 logprobs 5": SamplerParams(top_p=0.9, logprobs=5),
}
_TARGETS = {1: [Target("microseconds", 15.0)], 256: [Target("microseconds", 100.0)]}
"""The longest times of batches."""

Draw = Callable[[torch.Tensor], torch.Tensor]


def cases(*, tiny: bool) -> list[Case]:
    """Return every way to sample, for each number of rows."""
    batches, vocabulary = ((3,), 1000) if tiny else ((1, 32, 256), _VOCABULARY)
    return [
        Case(
            kernel="sampling",
            shape=f"{name} b{rows}",
            work=sampling(rows, vocabulary),
            make=partial(_contestants, name, rows, vocabulary),
            targets=_TARGETS.get(rows, []) if name != _FLAT else [],
            first=name in ("greedy", "top_k 50 top_p 0.9") and rows != 32,
        )
        for rows in batches
        for name in _VARIANTS
    ]


def _contestants(name: str, rows: int, vocabulary: int, setting: Setting) -> Contestants:
    params, count = _VARIANTS[name], setting.sets(4.0 * rows * vocabulary)
    history = setting.integers(vocabulary, rows, _HISTORY + 1)  # the last is for the drawn token
    sets = [_logits(name == _FLAT, rows, vocabulary, setting) for _ in range(count)]
    pristine = sets[0].clone()
    sizes = {"vocab_size": vocabulary, "num_slots": rows, "max_rows": rows}
    wanted = max(params.logprobs, 1)
    sampler = DeviceSampler(setting.loader, history=history, max_logprobs=wanted, **sizes)
    seeded = [attrs.evolve(params, seed=1000 + row) for row in range(rows)]
    for slot, of_row in enumerate(seeded):
        sampler.open(slot, of_row, _PROMPT)
    slots = torch.arange(rows, dtype=torch.int32, device=setting.device)
    lengths = torch.full_like(slots, _HISTORY)
    launches = [partial(sampler.launch, logits, slots, lengths) for logits in sets]

    def error() -> float:
        """Return the share of rows with another token, or the distance of log-probabilities."""
        poison(sampler.outputs.tokens, sampler.outputs.logprobs)
        launches[0]()
        on_host = history.cpu()
        given = zip(seeded, on_host.numpy(), strict=True)
        sampler_rows = [SamplerRow(one, tokens[:_HISTORY], _PROMPT) for one, tokens in given]
        expected = Sampler(vocabulary, "cpu").sample(pristine.cpu().clone(), sampler_rows)
        drawn = sampler.outputs.tokens.cpu()
        if not torch.equal(on_host[:, _HISTORY], drawn):
            return float("inf")
        different = float((drawn != expected.tokens).float().mean())
        if expected.logprobs is None or different:
            return different
        return float((sampler.outputs.logprobs.cpu() - expected.logprobs).abs().max())

    ours = Contestant(launches=launches, error=error, tolerance=_NEAR_TIES)
    # Penalties and log-probabilities are offered by no peer.
    compared = name != "penalties" and params.logprobs < 0
    return {OURS: lambda: ours, **(_peers(params, sets, pristine) if compared else {})}


def _logits(flat: bool, rows: int, vocabulary: int, setting: Setting) -> torch.Tensor:
    noise, more = (setting.random(rows, vocabulary, dtype=torch.float32) for _ in range(2))
    ranks = noise.argsort(dim=-1).argsort(dim=-1) + 1
    return noise if flat else 0.01 * more - _ZIPF * ranks.float().log()


def _peers(params: SamplerParams, sets: list[torch.Tensor], pristine: torch.Tensor) -> Contestants:
    """Return peers, which draw random numbers of their own: each token must be one that is kept."""

    def contestant(draw: Draw) -> Contestant:
        def error() -> float:
            tokens = draw(pristine.clone()).long().cpu()
            kept = _weights(pristine.cpu(), params) > 0
            return 1.0 - float(kept.gather(1, tokens[:, None]).float().mean())

        launches = [partial(draw, logits) for logits in sets]
        return Contestant(launches=launches, error=error, tolerance=_NEAR_TIES)

    if params.temperature == 0:
        return {"torch argmax": lambda: contestant(lambda logits: logits.argmax(dim=-1))}
    peers = {"flashinfer": lambda: contestant(_flashinfer_draw(params))}
    if params.top_k == 0 and params.top_p == 1.0:
        peers["torch"] = lambda: contestant(partial(_multinomial, params.temperature))
    return peers


def _multinomial(temperature: float, logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1)[:, 0]


def _flashinfer_draw(params: SamplerParams) -> Draw:
    """Return a draw without min_p, which can't be had together with the others."""
    module = flashinfer_module()
    fixed = {"seed": 1234, "offset": 0}  # a generator's state can't be read in a capture
    if params.top_k == 0 and params.top_p == 1.0:
        return lambda logits: module.sampling_from_logits(logits / params.temperature, **fixed)
    draw = module.top_k_top_p_sampling_from_logits
    top_k = params.top_k or 1 << 30
    return lambda logits: draw(
        logits / params.temperature, min(top_k, logits.shape[1]), params.top_p, **fixed
    )


def _weights(logits: torch.Tensor, params: SamplerParams) -> torch.Tensor:
    """Return [rows, vocabulary]: 0 for the tokens that the parameters drop."""
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    if params.temperature == 0:
        return (scaled == 0).float()
    scaled /= params.temperature
    weights = scaled.exp()
    truncate(scaled, weights, [params] * len(logits), list(range(len(logits))))
    return weights
