"""Loading a model that torch computes on the CPU."""

from __future__ import annotations

import torch

from gpu.attention import CacheShape
from gpu.attention.torch_cpu import TorchCpuAttention
from gpu.cpu.torch_model import TorchModel, TorchSampler
from gpu.loading import OnProgress
from gpu.models import build_model
from gpu.models.decoder import Decoder
from gpu.rope import cos_sin_table
from gpu.sampler import Sampler
from gpu.weights.tensors import load_weights
from trioserve.model_files import ModelFiles
from trioserve.wire import Start

__all__ = ["give_cache", "load_decoder", "make_sampler"]


def load_decoder(files: ModelFiles, dtype: str, threads: int, on_progress: OnProgress) -> Decoder:
    """The model with its weights, in bfloat16 or float32.

    From here on torch computes with ``threads`` threads.

    Raises:
        ModelLoadError: the files are damaged, or another model's.
    """
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")

    def on_weights(done: int, total: int) -> None:
        on_progress("weights", done, total)

    weights = load_weights(files, getattr(torch, dtype), on_weights)
    return build_model(files.config, weights)


def give_cache(decoder: Decoder, start: Start, num_pages: int) -> TorchModel:
    """The model with a KV cache of ``num_pages`` pages."""
    config = decoder.config
    shape = CacheShape(
        num_layers=config.num_layers,
        num_pages=num_pages,
        page_size=start.page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=decoder.dtype,
        device=decoder.device,
    )
    rows = min(start.max_model_len, num_pages * start.page_size)
    table = torch.from_numpy(cos_sin_table(config, start.max_model_len, rows))
    attention = TorchCpuAttention(shape, config.num_heads, table, config.windows)
    return TorchModel(decoder, attention)


def make_sampler(start: Start, vocab_size: int) -> TorchSampler:
    """Draws and reports as ``start`` wants it."""
    processed = start.logprobs_mode == "processed"
    return TorchSampler(Sampler(vocab_size, "cpu", processed_logprobs=processed))
