"""Other libraries' kernels, on the same inputs as ours. What isn't installed is named as absent."""

from __future__ import annotations

import importlib
from typing import Any

from bench.kernels.case import PeerAbsent


def flashinfer_module() -> Any:
    """Return FlashInfer (https://github.com/flashinfer-ai/flashinfer), if it is here."""
    needs_cuda()
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise PeerAbsent(f"flashinfer: {error}") from None


def needs_cuda() -> None:
    """Raise :class:`PeerAbsent` where there is no GPU to run the peer on."""
    import torch

    if not torch.cuda.is_available():
        raise PeerAbsent("needs a GPU")
