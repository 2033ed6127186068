"""Cases of the adapters' kernels: a product of Llama-3.1-8B, its tokens with adapters in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import numpy as np
import torch

from bench.kernels.case import Case, Contestant, Peer, Setting, Trial, relative_error
from bench.kernels.roofline import lora_update
from bench.kernels.targets import Target
from gpu.kernels.lora import ENTRY, TILE, LoraUpdate, ProductShape, padded_rank

_DTYPE = torch.bfloat16
_ONE_ROUNDING = 3e-3


@attrs.frozen(kw_only=True)
class _Spec:
    tokens: int
    adapters: int
    rank: int = 16
    inputs: int = 4096
    outputs: int = 4096

    @property
    def counts(self) -> list[int]:
        """The number of tokens of each adapter: all have one, in turn."""
        return [len(range(first, self.tokens, self.adapters)) for first in range(self.adapters)]


_SPECS = (
    (_Spec(tokens=1, adapters=1), [Target(kind="microseconds", value=8.0)]),
    (_Spec(tokens=32, adapters=8), [Target(kind="microseconds", value=10.0)]),
    (_Spec(tokens=256, adapters=8), []),
    (_Spec(tokens=256, adapters=8, rank=64, inputs=14336), []),
    (_Spec(tokens=8192, adapters=4), [Target(kind="floor", value=0.5)]),
)
_TINY = ((_Spec(tokens=5, adapters=2, inputs=1096, outputs=88), []),)


def cases(*, tiny: bool) -> list[Case]:
    """Return every case of these kernels."""
    specs = _TINY if tiny else _SPECS
    return [
        Case(
            kernel="lora",
            shape=f"{spec.tokens}x{spec.inputs} to {spec.outputs}, "
            f"{spec.adapters} of rank {spec.rank}",
            work=lora_update(spec.counts, spec.inputs, spec.outputs, spec.rank),
            make=partial(_trial, spec),
            targets=targets,
            quick=spec.rank == 16,
        )
        for spec, targets in specs
    ]


def _trial(spec: _Spec, setting: Setting) -> Trial:
    shape = ProductShape(spec.inputs, (spec.outputs,))
    a = setting.random((spec.adapters, spec.rank, spec.inputs), scale=spec.inputs**-0.5)
    b = setting.random((spec.adapters, spec.outputs, spec.rank), scale=spec.rank**-0.5)
    work = lora_update(spec.counts, spec.inputs, spec.outputs, spec.rank)
    count = setting.sets(work.bytes)
    xs = [setting.random((spec.tokens, spec.inputs)) for _ in range(count)]
    ys = [setting.random((spec.tokens, spec.outputs)) for _ in range(count)]
    tokens = [torch.arange(first, spec.tokens, spec.adapters) for first in range(spec.adapters)]

    def contestant(run: Callable[[torch.Tensor, torch.Tensor], object]) -> Contestant:
        def error() -> float:
            before = ys[0].clone()
            wanted = before.double()
            for adapter, own in enumerate(tokens):
                t = xs[0][own].double() @ a[adapter].double().t()
                wanted[own] += t @ b[adapter].double().t()
            run(xs[0], ys[0])
            # Launches add up, so the next one finds the numbers of before.
            found = ys[0].clone()
            ys[0].copy_(before)
            return relative_error(found, wanted)

        launches = [partial(run, x, y) for x, y in zip(xs, ys, strict=True)]
        return Contestant(launches=launches, error=error, tolerance=2 * _ONE_ROUNDING)

    on_device = [own.to(setting.device) for own in tokens]

    def by_group(x: torch.Tensor, y: torch.Tensor) -> None:
        for adapter, own in enumerate(on_device):
            delta = x.index_select(0, own) @ a[adapter].t() @ b[adapter].t()
            y.index_add_(0, own, delta)

    ours = _kernels(spec, shape, a, b, tokens, setting)
    return Trial(
        ours=contestant(ours), peers=[Peer(name="torch eager", make=lambda: contestant(by_group))]
    )


def _kernels(
    spec: _Spec,
    shape: ProductShape,
    a: torch.Tensor,
    b: torch.Tensor,
    tokens: list[torch.Tensor],
    setting: Setting,
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    assert padded_rank(spec.rank) == spec.rank
    entries = np.zeros((spec.adapters, 1), ENTRY)
    entries["b"], entries["rank0"] = a[0].numel(), spec.rank
    tiles: list[tuple[int, int, int]] = []
    first = 0
    for adapter, own in enumerate(tokens):
        starts = range(0, len(own), TILE)
        tiles += [(adapter, first + start, min(TILE, len(own) - start)) for start in starts]
        first += len(own)
    update = LoraUpdate(
        setting.loader,
        shapes=[shape],
        places=torch.cat([a.flatten(1), b.flatten(1)], dim=1),
        entries=torch.from_numpy(entries.view(np.int64).reshape(-1, 1, 4)).to(setting.device),
        tiles=torch.tensor(tiles, dtype=torch.int32, device=setting.device),
        tokens=torch.cat(tokens).to(setting.device, torch.int32),
        max_rank=spec.rank,
    )
    return lambda x, y: update.launch(0, shape, len(tiles), x, y)
