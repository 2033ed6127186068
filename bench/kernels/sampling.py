"""Cases of the sampler: all launches from logits to a token in the device's history.

The tokens must be those of :class:`gpu.sampling.sampler.Sampler`, which computes in torch
operations with the same random numbers; only near ties may fall otherwise. The least that any
sampler moves is one pass over the logits. (In a model they were written just before: a few rows are
still in the cache.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch

from bench.kernels.case import Case, Contestant, Peer, Setting, Trial, poison
from bench.kernels.peers import flashinfer_module
from bench.kernels.roofline import sampling
from bench.kernels.targets import Target
from bench.kernels.timing import Launch
from gpu.cuda.sampler import DeviceSampler
from gpu.sampling.sampler import Sampler
from gpu.sampling.sampler_io import SamplerRow
from trioserve.protocol.sampling import SamplerParams

_VOCABULARY = 128256
_HISTORY = 1000
_PROMPT = 600
# Probabilities fall with the rank to this power, as those of a model do that knows what comes.
_ZIPF = 1.4
# Where a draw nearly ties, another order of additions decides it otherwise.
_NEAR_TIES = 0.01


@attrs.frozen(kw_only=True)
class _Variant:
    """One way to sample. ``flat`` logits are normal numbers: no few tokens hold the probability."""

    name: str
    params: SamplerParams
    flat: bool = False


_PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
_PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_p 0.9 flat": {"top_p": 0.9},
    "top_k 50 top_p 0.9": {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": _PENALTIES,
    "top_p 0.9 logprobs 5": {"top_p": 0.9, "logprobs": 5},
}
_VARIANTS = [
    _Variant(name=name, params=SamplerParams(**params), flat=name.endswith("flat"))
    for name, params in _PARAMS.items()
]


def cases(*, tiny: bool) -> list[Case]:
    """Return every way to sample, for each number of rows."""
    if tiny:
        return [_case(variant, 3, 1000) for variant in _VARIANTS]
    return [_case(variant, rows, _VOCABULARY) for rows in (1, 32, 256) for variant in _VARIANTS]


def _case(variant: _Variant, rows: int, vocabulary: int) -> Case:
    targets = []
    if not variant.flat:
        limit = {1: 15.0, 256: 100.0}.get(rows)
        targets = [Target(kind="microseconds", value=limit)] if limit else []
    return Case(
        kernel="sampling",
        shape=f"{variant.name} b{rows}",
        work=sampling(rows, vocabulary),
        make=partial(_make, variant, rows, vocabulary),
        targets=targets,
        quick=variant.name in ("greedy", "top_k 50 top_p 0.9") and rows != 32,
    )


@attrs.frozen(kw_only=True)
class _Data:
    params: list[SamplerParams]  # of each row; they differ in their seed
    history: torch.Tensor  # [rows, _HISTORY + 1] int32; the last place is for the drawn token
    logits: list[torch.Tensor]  # sets of [rows, vocabulary] float32
    pristine: torch.Tensor  # the first set as it was


def _make(variant: _Variant, rows: int, vocabulary: int, setting: Setting) -> Trial:
    data = _make_data(variant, rows, vocabulary, setting)
    wanted = max(variant.params.logprobs, 1)
    sizes = {"vocab_size": vocabulary, "num_slots": rows, "max_rows": rows}
    sampler = DeviceSampler(setting.loader, history=data.history, max_logprobs=wanted, **sizes)
    for slot, params in enumerate(data.params):
        sampler.open(slot, params, _PROMPT)
    slots = torch.arange(rows, dtype=torch.int32, device=setting.device)
    lengths = torch.full_like(slots, _HISTORY)
    launches = [partial(sampler.launch, logits, slots, lengths) for logits in data.logits]

    def error() -> float:
        poison(sampler.outputs.tokens, sampler.outputs.logprobs)
        launches[0]()
        return _distance(data, sampler)

    ours = Contestant(launches=launches, error=error, tolerance=_NEAR_TIES)
    return Trial(ours=ours, peers=_peers(variant, data))


def _make_data(variant: _Variant, rows: int, vocabulary: int, setting: Setting) -> _Data:
    params = [attrs.evolve(variant.params, seed=1000 + row) for row in range(rows)]
    history = torch.randint(
        vocabulary, (rows, _HISTORY + 1), generator=setting.generator, device=setting.device
    ).to(torch.int32)
    count = setting.sets(4.0 * rows * vocabulary)
    logits = [_logits(variant, rows, vocabulary, setting) for _ in range(count)]
    return _Data(params=params, history=history, logits=logits, pristine=logits[0].clone())


def _logits(variant: _Variant, rows: int, vocabulary: int, setting: Setting) -> torch.Tensor:
    noise = setting.random((rows, vocabulary), torch.float32)
    if variant.flat:
        return noise
    ranks = noise.argsort(dim=-1).argsort(dim=-1) + 1
    return -_ZIPF * ranks.float().log() + 0.01 * setting.random((rows, vocabulary), torch.float32)


def _distance(data: _Data, sampler: DeviceSampler) -> float:
    """Return the share of rows with another token, or the distance of log-probabilities."""
    rows = [
        SamplerRow(params, tokens[:_HISTORY], _PROMPT)
        for params, tokens in zip(data.params, data.history.cpu().numpy(), strict=True)
    ]
    expected = Sampler(data.pristine.shape[1], "cpu").sample(data.pristine.cpu().clone(), rows)
    drawn = sampler.outputs.tokens.cpu()
    different = float((drawn != expected.tokens).float().mean())
    if not torch.equal(data.history[:, _HISTORY].cpu(), drawn):
        return float("inf")
    if expected.logprobs is None or different:
        return different
    return float((sampler.outputs.logprobs.cpu() - expected.logprobs).abs().max())


def _peers(variant: _Variant, data: _Data) -> list[Peer]:
    params = variant.params
    if "penalties" in variant.name or params.logprobs >= 0:
        return []
    if params.temperature == 0:
        return [Peer(name="torch argmax", make=lambda: _contestant(data, _argmax, _is_largest))]
    peers = [Peer(name="flashinfer", make=lambda: _flashinfer(variant, data))]
    if params.top_k == 0 and params.top_p == 1.0:
        peers.append(Peer(name="torch", make=lambda: _contestant(data, _multinomial, _is_token)))
    return peers


Draw = Callable[[torch.Tensor], torch.Tensor]


def _contestant(
    data: _Data, draw: Draw, allowed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Contestant:
    """Return a peer, which draws random numbers of its own: its tokens must be allowed."""
    launches: list[Launch] = [partial(draw, logits) for logits in data.logits]

    def error() -> float:
        tokens = draw(data.pristine.clone())
        return float((~allowed(data.pristine, tokens)).float().mean())

    return Contestant(launches=launches, error=error, tolerance=_NEAR_TIES)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


def _multinomial(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial((logits / 0.8).softmax(dim=-1), 1)[:, 0]


def _is_largest(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return tokens == logits.argmax(dim=-1)


def _is_token(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return (tokens >= 0) & (tokens < logits.shape[1])


def _flashinfer(variant: _Variant, data: _Data) -> Contestant:
    params, module = variant.params, flashinfer_module()
    if params.min_p > 0:
        # Its min_p is a draw of its own: it can't be had together with the others.
        params = attrs.evolve(params, min_p=0.0)
    draw = _flashinfer_draw(module, params)

    def kept(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return _kept(logits, params).gather(1, tokens.long()[:, None])[:, 0]

    return _contestant(data, draw, kept)


def _flashinfer_draw(module: Any, params: SamplerParams) -> Draw:
    fixed = {"seed": 1234, "offset": 0}  # a generator's state can't be read in a capture
    if params.top_k == 0 and params.top_p == 1.0:
        return lambda logits: module.sampling_from_logits(logits / params.temperature, **fixed)
    draw = module.top_k_top_p_sampling_from_logits
    top_k = params.top_k or 1 << 30
    return lambda logits: draw(
        logits / params.temperature, min(top_k, logits.shape[1]), params.top_p, **fixed
    )


def _kept(logits: torch.Tensor, params: SamplerParams) -> torch.Tensor:
    """Return [rows, vocabulary]: the tokens that top_k and top_p leave, ties included."""
    probabilities = (logits.double() / params.temperature).softmax(dim=-1)
    ordered = probabilities.sort(dim=-1, descending=True).values
    if params.top_k:
        ordered[:, params.top_k :] = 0
        ordered /= ordered.sum(dim=-1, keepdim=True)
    before = ordered.cumsum(dim=-1) - ordered
    count = (before < params.top_p + 1e-4).sum(dim=-1)
    if params.top_k:
        count = count.clamp(max=params.top_k)
    least = probabilities.sort(dim=-1, descending=True).values.gather(1, count[:, None] - 1)
    return probabilities >= least * (1 - 1e-6)
