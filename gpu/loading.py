"""From the engine's Start message to a runner that is ready for plans."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import torch

from gpu.attention import CacheShape
from gpu.attention.torch_cpu import TorchCpuAttention
from gpu.cpu_executor import CpuExecutor
from gpu.models import build_model
from gpu.models.decoder import Decoder
from gpu.rope import cos_sin_table
from gpu.runner import Runner
from gpu.sampler import Sampler
from gpu.slots import SlotTable
from gpu.weights import load_weights
from trioserve.errors import ModelLoadError
from trioserve.machine import Machine
from trioserve.model_files import ModelConfig, open_model
from trioserve.sampling import SamplerParams
from trioserve.wire import OpenSlot, Plan, Ready, Start, from_ints

__all__ = ["choose_dtype", "choose_max_model_len", "choose_num_pages", "load"]

DEFAULT_BATCHED_TOKENS = 512
DEFAULT_CACHE_BYTES = 2 << 30
# What the KV cache may take of the memory that is available once the weights are loaded: a quarter
# if that is enough for one sequence of full length, and at most this share.
DEFAULT_CACHE_SHARE = 0.25
LARGEST_CACHE_SHARE = 0.9
WARM_UP_TOKENS = 16

OnProgress = Callable[[str, int, int], None]


def load(start: Start, on_progress: OnProgress) -> tuple[Runner, Ready]:
    """Load a model within the limits of ``start`` and run one prompt through it.

    ``on_progress`` is called often, with a stage, how much of it is done, and of how much.

    Raises:
        ModelLoadError: the model can't be loaded or served so; one line says why and what to do.
    """
    _set_threads(start.num_threads)
    torch.set_float32_matmul_precision("highest")
    device = _choose_device(start.device)
    dtype = choose_dtype(start.dtype)
    files = open_model(Path(start.model))
    config = files.config
    max_model_len = choose_max_model_len(start.max_model_len, config)
    weights = load_weights(files, dtype, lambda done, total: on_progress("weights", done, total))
    model = build_model(config, weights)
    max_num_batched_tokens = start.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
    num_pages = choose_num_pages(
        start, _cache_shape(start, model, 1).bytes_per_page, max_model_len, Machine().memory()[1]
    )
    table = cos_sin_table(config, max_model_len)
    attention = TorchCpuAttention(
        _cache_shape(start, model, num_pages), config.num_heads, table, config.windows
    )
    sampler = Sampler(
        config.vocab_size, device, processed_logprobs=start.logprobs_mode == "processed"
    )

    def make_runner() -> Runner:
        slots = SlotTable(
            num_pages=num_pages,
            page_size=start.page_size,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
        )
        executor = CpuExecutor(model, attention, sampler, slots)
        return Runner(executor, slots, max_num_batched_tokens=max_num_batched_tokens)

    on_progress("warm-up", 0, 1)
    room = min(num_pages * start.page_size, max_model_len, max_num_batched_tokens)
    _warm_up(make_runner(), min(WARM_UP_TOKENS, room), start.page_size)
    on_progress("warm-up", 1, 1)
    # What is here now stays: the collector needn't look at it again.
    gc.collect()
    gc.freeze()
    return make_runner(), Ready(
        model_checksum=files.checksum(),
        device=device.type,
        device_name=Machine().cpu_name(),
        dtype=str(dtype).removeprefix("torch."),
        num_pages=num_pages,
        page_size=start.page_size,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=start.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def _set_threads(num_threads: int) -> None:
    """0 means the cores that this process may use, unless OMP_NUM_THREADS says otherwise."""
    if num_threads == 0 and not os.environ.get("OMP_NUM_THREADS"):
        num_threads = max(int(Machine().cores()), 1)
    if num_threads:
        torch.set_num_threads(num_threads)


def _choose_device(name: str) -> torch.device:
    if name not in ("auto", "cpu"):
        raise ModelLoadError(f"this build computes on a CPU only: use --device cpu, not {name}")
    return torch.device("cpu")


def choose_dtype(name: str) -> torch.dtype:
    """``auto`` is bfloat16 on a CPU that multiplies it, else float32.

    Raises:
        ModelLoadError: a number format that isn't computed with on a CPU.
    """
    if name == "auto":
        fast = {"avx512_bf16", "amx_bf16"} & set(Machine().cpu_features())
        return torch.bfloat16 if fast else torch.float32
    if name not in ("bfloat16", "float32"):
        raise ModelLoadError(f"{name} is not served on a CPU: use --dtype bfloat16 or float32")
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def choose_max_model_len(asked: int, config: ModelConfig) -> int:
    """The longest sequence to serve; ``asked`` is 0 for the model's own.

    Raises:
        ModelLoadError: more than the model can do.
    """
    longest = config.max_position_embeddings
    if config.rope_scaling is not None and config.rope_scaling.kind == "dynamic":
        longest = int(longest * config.rope_scaling.factor)
    if asked > longest:
        raise ModelLoadError(
            f"--max-model-len {asked} is more than this model's {longest} positions: lower it"
        )
    return asked or config.max_position_embeddings


def choose_num_pages(start: Start, bytes_per_page: int, max_model_len: int, available: int) -> int:
    """How many pages the KV cache gets, with ``available`` bytes of memory left.

    A number of pages that was asked for is taken as it is. Else there must be room for one sequence
    of ``max_model_len`` tokens.

    Raises:
        ModelLoadError: there isn't.
    """
    if start.num_pages:
        return start.num_pages
    needed = -(-max_model_len // start.page_size)
    if start.kv_cache_memory_bytes:
        most = start.kv_cache_memory_bytes // bytes_per_page
        pages, remedy = most, f"raise --kv-cache-memory-bytes to {needed * bytes_per_page}"
    else:
        most = int(available * LARGEST_CACHE_SHARE) // bytes_per_page
        wanted = min(DEFAULT_CACHE_BYTES, int(available * DEFAULT_CACHE_SHARE)) // bytes_per_page
        pages, remedy = max(wanted, needed), "free some memory"
    if needed > most:
        room = most * start.page_size
        raise ModelLoadError(
            f"the KV cache has room for {room} tokens and one sequence may have {max_model_len}: "
            f"lower --max-model-len or {remedy}"
        )
    return pages


def _cache_shape(start: Start, model: Decoder, num_pages: int) -> CacheShape:
    return CacheShape(
        num_layers=model.config.num_layers,
        num_pages=num_pages,
        page_size=start.page_size,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=model.dtype,
        device=model.device,
    )


def _warm_up(runner: Runner, num_tokens: int, page_size: int) -> None:
    """Prefill and sample once, so that libraries load and allocate before the first request."""
    opened = OpenSlot(
        slot=0,
        generation=0,
        tokens=from_ints([0] * num_tokens),
        prompt_length=num_tokens,
        computed=0,
        pages=from_ints(range(-(-num_tokens // page_size))),
        sampler=SamplerParams(temperature=0.0),
    )
    runner.step(
        Plan(
            number=1, opened=[opened], row_slots=from_ints([0]), row_counts=from_ints([num_tokens])
        )
    )
