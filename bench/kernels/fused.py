"""Cases of the small fused kernels, at the sizes of Llama-3.1-8B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch
import torch.nn.functional as F

from bench.kernels.attention_data import DTYPE, AttentionSpec, in_sequence, make_data
from bench.kernels.case import (
    ONE_ROUNDING,
    Case,
    Contestant,
    Contestants,
    Setting,
    flashinfer_module,
    poison,
)
from bench.kernels.roofline import Work, rms_norm, rope_and_write, silu_mul
from bench.kernels.targets import OURS, Target
from bench.random_model import LLAMA_8B, TINY
from gpu.attention.kv_cache import LayerCache
from gpu.kernels.gather_tokens import GatherTokens
from gpu.kernels.rms_norm import RmsNorm
from gpu.kernels.rope_and_write import RopeAndWrite
from gpu.kernels.silu_mul import SiluMul
from gpu.models.rope import cos_sin_table
from trioserve.model_files import ModelConfig

_TOKENS = (1, 32, 256, 8192)
_MAX_POSITION = 16384
_EPS = 1e-5


def cases(*, tiny: bool) -> list[Case]:
    """Return every case of these kernels."""
    sizes, counts, rows = (TINY, (3,), 64) if tiny else (LLAMA_8B, _TOKENS, 256)
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    gather = Case(
        kernel="gather_tokens",
        shape=f"{rows} rows",
        # A slot, a position, a token read and a token written, 4 + 4 + 4 + 8 bytes.
        work=Work(bytes=20.0 * rows),
        make=partial(_gather, rows),
        targets=[Target("microseconds", 3.0)],
        first=True,
    )
    found = [gather, _rope_case(sizes, counts[-1], fp8=True)]
    for tokens in counts:
        norm, silu = rms_norm(tokens, hidden), silu_mul(tokens, inner)
        make_norm, make_silu = partial(_norm, tokens, hidden), partial(_silu, tokens, inner)
        found += [
            _case("rms_norm", tokens, f"{tokens}x{hidden} add", norm, make_norm, 0.85),
            _case("silu_mul", tokens, f"{tokens}x{inner}", silu, make_silu, 0.9),
            _rope_case(sizes, tokens),
        ]
    return found


def _case(
    kernel: str,
    tokens: int,
    shape: str,
    work: Work,
    make: Callable[[Setting], Contestants],
    share: float,
    otherwise: Sequence[Target] = (),
) -> Case:
    """Return a case that is to reach a share of the floor.

    The share is asked for where the data is far larger than any launch's overhead.
    """
    targets = [Target("floor", share)] if tokens == _TOKENS[-1] else otherwise
    first = tokens not in _TOKENS[1:-1]
    return Case(kernel=kernel, shape=shape, work=work, make=make, targets=targets, first=first)


def _rope_case(sizes: ModelConfig, tokens: int, *, fp8: bool = False) -> Case:
    spec = AttentionSpec(
        rows=[(tokens, tokens)],
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        fp8=fp8,
    )
    shape, work = f"{tokens} tokens{' fp8' if fp8 else ''}", rope_and_write(spec, tokens)
    short, make = [Target("microseconds", 3.0)], partial(_rope, sizes, spec)
    return _case("rope_and_write", tokens, shape, work, make, 0.8, short)


def _norm(tokens: int, hidden: int, setting: Setting) -> Contestants:
    kernel = RmsNorm(setting.loader, hidden_size=hidden, dtype=DTYPE)
    weight = setting.random(hidden)
    inputs = [
        [setting.random(tokens, hidden) for _ in range(2)]
        for _ in range(setting.sets(rms_norm(tokens, hidden).bytes))
    ]
    sets = [(x, residual, weight, _EPS, torch.empty_like(x)) for x, residual in inputs]

    def expected() -> torch.Tensor:
        x, residual = (each.double() for each in inputs[0])
        total = (x + residual).to(DTYPE).double()
        return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + _EPS) * weight.double()

    def flashinfer() -> Contestant:
        # It norms in place: copies keep the inputs of the others.
        copies = [(x.clone(), *others) for x, *others, _ in sets]
        run = flashinfer_module().fused_add_rmsnorm
        return Contestant.over(copies, run, expected, found=lambda _: copies[0][0])

    def eager(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        residual.add_(x)
        out.copy_(F.rms_norm(residual, (hidden,), weight, eps))

    return {
        OURS: lambda: Contestant.over(sets, kernel.launch_add, expected, tolerance=ONE_ROUNDING),
        "flashinfer": flashinfer,
        "torch eager": lambda: Contestant.over(sets, eager, expected),
    }


def _silu(tokens: int, inner: int, setting: Setting) -> Contestants:
    kernel = SiluMul(setting.loader, inner_size=inner, dtype=DTYPE)
    num_sets = setting.sets(silu_mul(tokens, inner).bytes)
    inputs = [setting.random(tokens, 2 * inner) for _ in range(num_sets)]
    sets = [(x, x.new_empty(tokens, inner)) for x in inputs]

    def expected() -> torch.Tensor:
        gate, up = inputs[0].double().chunk(2, dim=-1)
        return F.silu(gate) * up

    def eager(x: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = x.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)

    return {
        OURS: lambda: Contestant.over(sets, kernel.launch, expected),
        "flashinfer": lambda: Contestant.over(sets, flashinfer_module().silu_and_mul, expected),
        "torch eager": lambda: Contestant.over(sets, eager, expected),
    }


def _rope(sizes: ModelConfig, spec: AttentionSpec, setting: Setting) -> Contestants:
    data, [tokens] = make_data(spec, setting), spec.counts
    cos_sin = torch.from_numpy(cos_sin_table(sizes, _MAX_POSITION)).to(setting.device)
    kernel = RopeAndWrite(
        setting.loader,
        dtype=DTYPE,
        cache_dtype=spec.cache_dtype,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=spec.page_size,
        cos_sin=cos_sin,
    )
    locations = setting.permutation(spec.num_pages * spec.page_size)[:tokens].contiguous()
    positions = setting.permutation(_MAX_POSITION)[:tokens].contiguous()
    kernel.prepare(positions, locations)
    first, kv_heads = data.sets[0], spec.num_kv_heads

    def launch(qkv: torch.Tensor, layer: LayerCache) -> None:
        scales = {"k_scale": layer.key_scales, "v_scale": layer.value_scales}
        kernel.launch(qkv, layer.keys, layer.values, rotate=True, **scales)

    def expected() -> torch.Tensor:
        q, k, v = first.qkv.double().split((spec.num_heads, kv_heads, kv_heads), dim=1)
        angles = cos_sin[positions.long()]
        poison(*(each for each in attrs.astuple(first.cache) if each is not None))
        return torch.cat([_rotate(q, angles), _rotate(k, angles), v], dim=1)

    def found(_: object) -> torch.Tensor:
        keys, values = (each[locations.long()] for each in in_sequence(first.cache))
        return torch.cat([first.q.double(), keys, values], dim=1)

    # e4m3 keeps three bits: half a step is up to 2**-4, a third of that on average.
    tolerance = 0.04 if spec.fp8 else ONE_ROUNDING
    sets = [(buffers.qkv, buffers.cache) for buffers in data.sets]
    how = {"found": found, "tolerance": tolerance}
    return {OURS: lambda: Contestant.over(sets, launch, expected, **how)}


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [T, heads, D] with its halves rotated into each other."""
    cos, sin = cos_sin.double()[:, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _gather(rows: int, setting: Setting) -> Contestants:
    length = 4096
    history = setting.integers(128256, rows, length)
    kernel = GatherTokens(setting.loader, history=history)
    slots, positions = setting.permutation(rows), setting.permutation(length)[:rows].contiguous()
    tokens = torch.empty(rows, dtype=torch.int64, device=setting.device)
    sets = [(slots, positions, tokens)]

    def expected() -> torch.Tensor:
        return history[slots.long(), positions.long()]

    return {OURS: lambda: Contestant.over(sets, kernel.launch, expected, tolerance=0.0)}
