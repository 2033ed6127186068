"""Compile the peers' kernels ahead: ``python -m bench.kernels.build_peers``.

FlashInfer compiles a kernel with nvcc when it is first asked for, one after the other. Here all
that ``bench.kernels`` asks for are compiled side by side, those of the most cases first.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import torch

from bench.kernels.case import PeerAbsent, flashinfer_module

_BF16, _E4M3 = torch.bfloat16, torch.float8_e4m3fn
_PAGE_SIZE = 16
_NO_POSITIONS = 0  # FlashInfer's number for "positions are not its business"


def _module(path: str, name: str, *arguments: object) -> Any:
    return getattr(importlib.import_module(f"flashinfer.jit.{path}"), name)(*arguments)


def _paged(backend: str, *, head_dim: int = 128, kv: Any = _BF16, window: bool = False) -> Any:
    types, sizes = (_BF16, kv, _BF16, torch.int32), (head_dim, head_dim, _NO_POSITIONS)
    options = (*types, *sizes, window, False, False)
    return _module("attention.modules", "gen_batch_prefill_module", backend, *options)


def _xqa(*, head_dim: int = 128, group: int = 4, kv: Any = _BF16, window: bool = False) -> Any:
    sizes = (_PAGE_SIZE, head_dim, group)
    return _module("xqa", "gen_xqa_module", _BF16, kv, *sizes, window, _BF16, 1)


def main() -> int:
    """Compile; 0 as well where FlashInfer is absent, for then there is nothing to compile."""
    try:
        flashinfer = flashinfer_module()
    except PeerAbsent as absent:
        print(absent)
        return 0
    build = importlib.import_module("flashinfer.jit.core").build_jit_specs
    modules = (
        ("norm", "gen_norm_module"),
        ("activation", "gen_act_and_mul_module", "silu"),
        ("sampling", "gen_sampling_module"),
        ("cascade", "gen_cascade_module"),
    )
    first = [_paged("fa2"), _paged("fa3"), _xqa(), *(_module(*names) for names in modules)]
    special: tuple[dict[str, Any], ...] = ({"window": True}, {"head_dim": 64})
    then = [_paged(backend, **case) for backend in ("fa2", "fa3") for case in special]
    then += [_xqa(**case) for case in (*special, {"kv": _E4M3}, {"group": 1}, {"group": 8})]
    then.append(_paged("fa2", kv=_E4M3))
    print(f"flashinfer {flashinfer.__version__}: {len(first) + len(then)} modules", flush=True)
    for specs in (first, then):
        began = time.monotonic()
        build(specs)
        print(f"{len(specs)} modules in {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
