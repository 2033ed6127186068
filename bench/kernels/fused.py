"""Cases of the small fused kernels, at the sizes of Llama-3.1-8B: norm, gate, rotary embedding with
the write to the cache, and the gather of a step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch
import torch.nn.functional as F

from bench.kernels.case import Case, Contestant, Peer, Setting, Trial, poison, relative_error
from bench.kernels.peers import flashinfer_module
from bench.kernels.roofline import AttentionShape, Work, rms_norm, rope_and_write, silu_mul
from bench.kernels.targets import Target
from bench.kernels.timing import Launch
from gpu.kernels.gather_tokens import GatherTokens
from gpu.kernels.rms_norm import RmsNorm
from gpu.kernels.rope_and_write import RopeAndWrite
from gpu.kernels.silu_mul import SiluMul

_EPS = 1e-5
_DTYPE, _E4M3 = torch.bfloat16, torch.float8_e4m3fn
# One rounding to bfloat16 is 2**-9 at most and half of that on average.
_ONE_ROUNDING = 3e-3
# Shares of the floor are asked for where the data is far larger than any launch's overhead.
_MANY_TOKENS = 8192


@attrs.frozen(kw_only=True)
class _Sizes:
    tokens: tuple[int, ...] = (1, 32, 256, _MANY_TOKENS)
    hidden: int = 4096
    inner: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    max_position: int = 16384


_TINY = _Sizes(
    tokens=(3,), hidden=64, inner=96, num_heads=4, num_kv_heads=2, head_dim=64, max_position=64
)


def cases(*, tiny: bool) -> list[Case]:
    """Return every case of these kernels."""
    sizes = _TINY if tiny else _Sizes()
    found: list[Case] = []
    for tokens in sizes.tokens:
        quick = tokens in (sizes.tokens[0], sizes.tokens[-1])
        found.append(
            Case(
                kernel="rms_norm",
                shape=f"{tokens}x{sizes.hidden} add",
                work=rms_norm(tokens, sizes.hidden, residual=True),
                make=partial(_norm, sizes, tokens),
                targets=_targets(tokens, 0.85),
                quick=quick,
            )
        )
        found.append(
            Case(
                kernel="silu_mul",
                shape=f"{tokens}x{sizes.inner}",
                work=silu_mul(tokens, sizes.inner),
                make=partial(_silu, sizes, tokens),
                targets=_targets(tokens, 0.9),
                quick=quick,
            )
        )
        found.append(_rope_case(sizes, tokens, quick, fp8=False))
    found.append(_rope_case(sizes, sizes.tokens[-1], False, fp8=True))
    rows = min(256, sizes.max_position)
    found.append(
        Case(
            kernel="gather_tokens",
            shape=f"{rows} rows",
            # A slot, a position, a token read and a token written, 4 + 4 + 4 + 8 bytes.
            work=Work(bytes=20.0 * rows),
            make=partial(_gather, rows),
            targets=[Target(kind="microseconds", value=3.0)],
            quick=True,
        )
    )
    return found


def _targets(tokens: int, share: float, microseconds: float | None = None) -> list[Target]:
    if tokens >= _MANY_TOKENS:
        return [Target(kind="floor", value=share)]
    if microseconds is not None and tokens <= 256:
        return [Target(kind="microseconds", value=microseconds)]
    return []


def _contestant(
    launches: Sequence[Launch],
    out: torch.Tensor,
    reference: Callable[[], torch.Tensor],
    *,
    roundings: int = 2,
    poisoned: torch.Tensor | None = None,
) -> Contestant:
    """Return a contestant; its first launch writes ``out``, which equals ``reference`` exactly."""

    def error() -> float:
        expected = reference()
        poison(out if poisoned is None else poisoned)
        launches[0]()
        return relative_error(out, expected)

    return Contestant(launches=launches, error=error, tolerance=roundings * _ONE_ROUNDING)


def _norm(sizes: _Sizes, tokens: int, setting: Setting) -> Trial:
    kernel = RmsNorm(setting.loader, hidden_size=sizes.hidden, dtype=_DTYPE)
    weight = setting.random((sizes.hidden,))
    count = setting.sets(rms_norm(tokens, sizes.hidden, residual=True).bytes)
    xs = [setting.random((tokens, sizes.hidden)) for _ in range(count)]
    residuals = [setting.random((tokens, sizes.hidden)) for _ in range(count)]
    outs = [torch.empty_like(x) for x in xs]

    def reference() -> torch.Tensor:
        total = (xs[0].double() + residuals[0].double()).to(_DTYPE).double()
        scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + _EPS)
        return total * scale * weight.double()

    def flashinfer() -> Contestant:
        fused = flashinfer_module().fused_add_rmsnorm
        # It norms in place: copies keep the inputs of the others.
        copies = [x.clone() for x in xs]
        pairs = zip(copies, residuals, strict=True)
        launches = [partial(fused, x, residual, weight, _EPS) for x, residual in pairs]
        return _contestant(launches, copies[0], reference, poisoned=outs[0])

    def eager() -> Contestant:
        def launch(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> None:
            residual.add_(x)
            out.copy_(F.rms_norm(residual, (sizes.hidden,), weight, _EPS))

        sets = zip(xs, residuals, outs, strict=True)
        return _contestant([partial(launch, *one) for one in sets], outs[0], reference)

    ours = [
        partial(kernel.launch_add, x, residual, weight, _EPS, out)
        for x, residual, out in zip(xs, residuals, outs, strict=True)
    ]
    peers = [Peer(name="flashinfer", make=flashinfer), Peer(name="torch eager", make=eager)]
    return Trial(ours=_contestant(ours, outs[0], reference, roundings=1), peers=peers)


def _silu(sizes: _Sizes, tokens: int, setting: Setting) -> Trial:
    kernel = SiluMul(setting.loader, inner_size=sizes.inner, dtype=_DTYPE)
    count = setting.sets(silu_mul(tokens, sizes.inner).bytes)
    inputs = [setting.random((tokens, 2 * sizes.inner)) for _ in range(count)]
    outs = [x.new_empty(tokens, sizes.inner) for x in inputs]

    def reference() -> torch.Tensor:
        gate, up = inputs[0].double().chunk(2, dim=-1)
        return F.silu(gate) * up

    def contestant(run: Callable[[torch.Tensor, torch.Tensor], object]) -> Contestant:
        launches = [partial(run, x, out) for x, out in zip(inputs, outs, strict=True)]
        return _contestant(launches, outs[0], reference)

    def eager(x: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = x.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)

    peers = [
        Peer(name="flashinfer", make=lambda: contestant(flashinfer_module().silu_and_mul)),
        Peer(name="torch eager", make=lambda: contestant(eager)),
    ]
    return Trial(ours=contestant(kernel.launch), peers=peers)


def _rope_case(sizes: _Sizes, tokens: int, quick: bool, *, fp8: bool) -> Case:
    heads = {name: getattr(sizes, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
    shape = AttentionShape(kv_bytes=1 if fp8 else 2, scale_bytes=4 if fp8 else 0, **heads)
    return Case(
        kernel="rope_and_write",
        shape=f"{tokens} tokens{' fp8' if fp8 else ''}",
        work=rope_and_write(shape, tokens),
        make=partial(_rope, sizes, tokens, fp8),
        targets=_targets(tokens, 0.8, 3.0),
        quick=quick,
    )


@attrs.frozen
class _Cache:
    """Keys and values [num_pages, K, page_size, D], and their scales [num_pages, K, page_size]."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @classmethod
    def new(cls, sizes: _Sizes, num_pages: int, dtype: torch.dtype, setting: Setting) -> _Cache:
        """Return a poisoned cache."""
        shape = (num_pages, sizes.num_kv_heads, sizes.page_size, sizes.head_dim)
        tensors = [torch.empty(shape, dtype=dtype, device=setting.device) for _ in range(2)]
        if dtype == _E4M3:
            tensors += [torch.empty(shape[:3], device=setting.device) for _ in range(2)]
        poison(*tensors)
        return cls(*tensors)

    def written(self, locations: torch.Tensor, page_size: int) -> list[torch.Tensor]:
        """Return keys and values at ``locations``, each [T, K, D] float64, scales applied."""
        pages, offsets = (locations // page_size).long(), (locations % page_size).long()
        found = []
        for cache, scale in ((self.k, self.k_scale), (self.v, self.v_scale)):
            values = cache[pages, :, offsets].double()
            if scale is not None:
                values = values * scale[pages, :, offsets].double()[..., None]
            found.append(values)
        return found


def _rope(sizes: _Sizes, tokens: int, fp8: bool, setting: Setting) -> Trial:
    heads, kv_heads, size = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    cache_dtype, page_size = _E4M3 if fp8 else _DTYPE, sizes.page_size
    cos_sin = _angles(sizes, setting)
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": size}
    types = {"dtype": _DTYPE, "cache_dtype": cache_dtype}
    how = {"page_size": page_size, "cos_sin": cos_sin}
    kernel = RopeAndWrite(setting.loader, **shape, **types, **how)
    num_pages = -(-tokens // page_size)
    locations = setting.permutation(num_pages * page_size)[:tokens].contiguous()
    positions = setting.permutation(sizes.max_position)[:tokens].contiguous()
    kernel.prepare(positions, locations)
    count = setting.sets(2 * tokens * (heads + 2 * kv_heads) * size)
    qkvs = [setting.random((tokens, heads + 2 * kv_heads, size)) for _ in range(count)]
    caches = [_Cache.new(sizes, num_pages, cache_dtype, setting) for _ in range(count)]

    def launch(qkv: torch.Tensor, cache: _Cache) -> None:
        scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
        kernel.launch(qkv, cache.k, cache.v, rotate=True, **scales)

    launches = [partial(launch, *pair) for pair in zip(qkvs, caches, strict=True)]

    def error() -> float:
        rotated = _rotate(qkvs[0][:, : heads + kv_heads].double(), cos_sin[positions.long()])
        values = qkvs[0][:, heads + kv_heads :].double()
        launches[0]()
        keys_read, values_read = caches[0].written(locations, page_size)
        return max(
            relative_error(qkvs[0][:, :heads], rotated[:, :heads]),
            relative_error(keys_read, rotated[:, heads:]),
            relative_error(values_read, values),
        )

    # e4m3 keeps three bits: half a step is up to 2**-4, a third of that on average.
    tolerance = 0.04 if fp8 else _ONE_ROUNDING
    return Trial(ours=Contestant(launches=launches, error=error, tolerance=tolerance))


def _angles(sizes: _Sizes, setting: Setting) -> torch.Tensor:
    """Return cos and sin of half a head each, [positions, D] float32."""
    half = sizes.head_dim // 2
    frequencies = 500000.0 ** (-torch.arange(half, device=setting.device) / half)
    positions = torch.arange(sizes.max_position, device=setting.device)
    angles = positions[:, None].double() * frequencies.double()
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float().contiguous()


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [T, heads, D] with its halves rotated into each other."""
    cos, sin = cos_sin.double()[:, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _gather(rows: int, setting: Setting) -> Trial:
    length, where = 4096, {"generator": setting.generator, "device": setting.device}
    history = torch.randint(128256, (rows, length), **where).to(torch.int32)
    kernel = GatherTokens(setting.loader, history=history)
    slots = setting.permutation(rows)
    positions = setting.permutation(length)[:rows].contiguous()
    tokens = torch.empty(rows, dtype=torch.int64, device=setting.device)
    launch = partial(kernel.launch, slots, positions, tokens)

    def error() -> float:
        poison(tokens)
        launch()
        return float((tokens != history[slots.long(), positions.long()]).sum())

    return Trial(ours=Contestant(launches=[launch], error=error, tolerance=0.0))
