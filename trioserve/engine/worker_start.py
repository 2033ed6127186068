"""The start of a model's workers: where the model is, what they load, and the log line of it."""

from __future__ import annotations

from pathlib import Path

import attrs

from trioserve.config import EngineConfig
from trioserve.config.speculation import parse_speculative
from trioserve.engine.loaded_model import in_thread
from trioserve.model_files import locate
from trioserve.observability.logs import get_logger
from trioserve.protocol import wire
from trioserve.protocol.speculation import SpeculativeConfig
from trioserve.scheduler.beam_search import MAX_CONTINUATIONS
from trioserve.workers.process import OnProgress, Workers
from trioserve.workers.socket_folder import sweep_socket_folders

_log = get_logger("trioserve.engine")


async def locate_model(config: EngineConfig) -> Path:
    """Return the path of the model, fetched if need be. Socket folders of dead engines are removed.

    Raises:
        ModelLoadError: it can't be found.
    """
    await in_thread(sweep_socket_folders)
    return await in_thread(lambda: locate(config.model, revision=config.revision))


def make_workers(
    config: EngineConfig,
    path: Path,
    on_progress: OnProgress | None,
    mock: wire.MockSteps | None,
) -> Workers:
    """Return the worker processes for the model at ``path``, of which none is started yet."""
    return Workers(
        start=start_message(config, path, mock),
        start_timeout=config.worker_start_timeout,
        on_progress=on_progress or (lambda _: None),
    )


def start_message(
    config: EngineConfig, path: Path, mock: wire.MockSteps | None = None
) -> wire.Start:
    """Return the message that tells a worker what to load, with the options for workers."""
    return wire.Start(
        model=str(path.resolve()),
        model_impl=config.model_impl,
        device=config.device,
        dtype=config.dtype,
        max_model_len=config.max_model_len or 0,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or 0,
        page_size=config.block_size,
        num_pages=config.num_gpu_blocks_override or 0,
        kv_cache_dtype=config.kv_cache_dtype,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes or 0,
        kv_offloading_bytes=config.kv_offloading_bytes or 0,
        gpu_memory_utilization=config.gpu_memory_utilization,
        num_threads=config.num_threads or 0,
        cpu_isa=config.cpu_isa,
        logprobs_mode=config.logprobs_mode,
        max_logprobs=max(config.max_logprobs, MAX_CONTINUATIONS),
        enforce_eager=config.enforce_eager,
        deterministic=config.deterministic,
        quantization=config.quantization,
        tokenizer="" if config.tokenizer is None else str(Path(config.tokenizer).resolve()),
        logits_processors=list(config.logits_processors),
        max_lora_rank=config.max_lora_rank if config.serves_adapters else 0,
        max_loras=config.max_loras,
        speculative=_speculative(config),
        mock=mock,
    )


def _speculative(config: EngineConfig) -> SpeculativeConfig | None:
    """Return the options of speculative decoding, with the path of a draft model."""
    options = parse_speculative(config.speculative_config)
    if options is None or not options.model:
        return options
    return attrs.evolve(options, model=str(locate(options.model).resolve()))


def log_loaded(name: str, ready: wire.Ready) -> None:
    """Log what a worker has loaded, and why it is slow, if it is."""
    _log.info(
        "model loaded",
        model=name,
        device=ready.device_name,
        computing=ready.computing,
        dtype=ready.dtype,
        max_model_len=ready.max_model_len,
        kv_cache_tokens=ready.num_pages * ready.page_size,
        **({"host_tokens": ready.num_host_pages * ready.page_size} if ready.num_host_pages else {}),
    )
    if ready.warning:
        _log.warning(ready.warning)
