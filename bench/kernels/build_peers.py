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

from bench.kernels.case import PeerAbsent
from bench.kernels.peers import flashinfer_module

_BF16, _E4M3 = torch.bfloat16, torch.float8_e4m3fn
_PAGE_SIZE = 16
_NO_POSITIONS = 0  # FlashInfer's number for "positions are not its business"


def _paged(
    backend: str, *, head_dim: int = 128, kv: torch.dtype = _BF16, window: bool = False
) -> Any:
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    return modules.gen_batch_prefill_module(
        *(backend, _BF16, kv, _BF16, torch.int32, head_dim, head_dim, _NO_POSITIONS),
        *(window, False, False),
    )


def _xqa(
    *, head_dim: int = 128, group: int = 4, kv: torch.dtype = _BF16, window: bool = False
) -> Any:
    module = importlib.import_module("flashinfer.jit.xqa")
    return module.gen_xqa_module(_BF16, kv, _PAGE_SIZE, head_dim, group, window, _BF16, 1)


def _from(module: str, name: str, *arguments: object) -> Any:
    return getattr(importlib.import_module(f"flashinfer.jit.{module}"), name)(*arguments)


def main() -> int:
    """Compile; 0 as well where FlashInfer is absent, for then there is nothing to compile."""
    try:
        flashinfer = flashinfer_module()
    except PeerAbsent as absent:
        print(absent)
        return 0
    build = importlib.import_module("flashinfer.jit.core").build_jit_specs
    first = [
        _paged("fa2"),
        _paged("fa3"),
        _xqa(),
        _from("norm", "gen_norm_module"),
        _from("activation", "gen_act_and_mul_module", "silu"),
        _from("sampling", "gen_sampling_module"),
        _from("cascade", "gen_cascade_module"),
    ]
    then = [
        _paged("fa2", kv=_E4M3),
        _paged("fa2", window=True),
        _paged("fa3", window=True),
        _paged("fa2", head_dim=64),
        _paged("fa3", head_dim=64),
        _xqa(kv=_E4M3),
        _xqa(window=True),
        _xqa(head_dim=64),
        _xqa(group=1),
        _xqa(group=8),
    ]
    print(f"flashinfer {flashinfer.__version__}: {len(first) + len(then)} modules", flush=True)
    for specs in (first, then):
        began = time.monotonic()
        build(specs)
        print(f"{len(specs)} modules in {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
