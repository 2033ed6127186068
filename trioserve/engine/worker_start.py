"""The start of a model's workers: where the model is, what they load, and the log line of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import attrs

from trioserve.config import EngineConfig
from trioserve.config.speculation import parse_speculative
from trioserve.engine.engine_worker import EngineWorker, MakeWorker
from trioserve.engine.host_devices import HostDevices
from trioserve.engine.loaded_model import in_thread
from trioserve.model_files import ENCODING, locate, open_model, task_of
from trioserve.observability.logs import get_logger
from trioserve.observability.metrics import Metrics
from trioserve.protocol import wire
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import Machine
from trioserve.protocol.speculation import SpeculativeConfig
from trioserve.scheduler.beam_search import MAX_CONTINUATIONS
from trioserve.workers.life import OnProgress
from trioserve.workers.process import Workers
from trioserve.workers.ray.port import ray_port
from trioserve.workers.remote.joined import JoinedWorkers
from trioserve.workers.remote.port import WorkersPort
from trioserve.workers.remote.tls import engine_tls
from trioserve.workers.socket_folder import sweep_socket_folders

_log = get_logger("trioserve.engine")


async def locate_model(config: EngineConfig) -> Path:
    """Return the path of the model, fetched if need be. Socket folders of dead engines are removed.

    Raises:
        ModelLoadError: it can't be found.
    """
    await in_thread(sweep_socket_folders)
    return await in_thread(lambda: locate(config.model, revision=config.revision))


@attrs.define(eq=False)
class WorkerProcesses:
    """The processes of an engine's workers, a series of them for each worker.

    The first series' progress is shown while it loads: the others load the same.
    """

    _make: Callable[[int, str | None], Workers]
    _devices: HostDevices
    first: list[Workers]
    """The processes of the workers that start with the engine."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        path: Path,
        on_progress: OnProgress | None,
        mock: wire.MockSteps | None,
    ) -> WorkerProcesses:
        """Return the processes for the model at ``path``; none is started yet."""
        start = start_message(config, path, mock)
        count = config.num_workers
        devices = HostDevices.of(config, Machine())

        def make(index: int, device: str | None = None) -> Workers:
            own = devices.take(index, device)
            return Workers(
                start=attrs.evolve(
                    start,
                    device=own.device,
                    cores=list(own.cores),
                    rank_cores=list(map(list, own.rank_cores)),
                    num_threads=start.num_threads or own.num_threads,
                    num_sharing=max(count, 1),
                ),
                start_timeout=config.worker_start_timeout,
                on_progress=on_progress if on_progress and not index else (lambda _: None),
            )

        return cls(make, devices, [make(index) for index in range(count)])

    @contextlib.asynccontextmanager
    async def ahead(self) -> AsyncIterator[None]:
        """Start the first process of each worker, as :meth:`Workers.process_ahead`."""
        async with contextlib.AsyncExitStack() as stack:
            for each in self.first:
                await stack.enter_async_context(each.process_ahead())
            yield

    def maker(self, config: EngineConfig, metrics: Metrics) -> MakeWorker:
        """Return the function that makes workers over these processes."""
        disk_folders: dict[str, set[bytes]] = {}

        def make(index: int, device: str | None = None) -> EngineWorker:
            is_first = index < len(self.first)
            workers = self.first[index] if is_first else self._make(index, device)
            made = EngineWorker.of(index, config, metrics, workers.open, traffic=workers.traffic)
            made.scheduler.feeds.disk_folders = disk_folders
            made.free_device = lambda: self._devices.free(index)
            workers.amend = made.amend
            return made

        return make


async def workers_port(
    config: EngineConfig, path: Path, mock: wire.MockSteps | None
) -> WorkersPort | None:
    """Return the port for workers of other hosts with the model at ``path``; None if not wanted.

    Raises:
        ModelLoadError: The model can't be read, or is an encoder.
        TrioserveError: The certificates can't be used, or the extra ``ray`` is missing.
    """
    if not config.uses_ray and config.worker_listen is None:
        return None

    def checksum() -> str:
        if task_of(path) in ENCODING:
            option = "--distributed-executor-backend ray" if config.uses_ray else "--worker-listen"
            raise ModelLoadError(f"{option} isn't for an encoder: leave it out")
        return open_model(path, config.model_impl).checksum()

    fields: dict[str, Any] = {
        "address": config.worker_listen or "",
        "timeout": config.worker_link_timeout,
        "checksum": await in_thread(checksum),
        "workers": JoinedWorkers(start_message(config, path, mock), config.worker_start_timeout),
    }
    if config.uses_ray:
        return ray_port(config, fields)
    assert config.worker_tls is not None
    return WorkersPort(tls=engine_tls(config.worker_tls), **fields)


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
        process_memory_limit=config.process_memory_limit or 0,
        kv_offloading_bytes=config.kv_host_bytes,
        kv_offloading_dir=config.kv_offloading_dir or "",
        kv_offloading_dir_bytes=config.kv_offloading_dir_bytes,
        hands_over=bool(config.disaggregation),
        gpu_memory_utilization=config.gpu_memory_utilization,
        num_threads=config.num_threads or 0,
        tensor_parallel_size=config.tensor_parallel_size,
        tensor_parallel_slices=config.tensor_parallel_slices or 0,
        pipeline_parallel_size=config.pipeline_parallel_size,
        pipeline_parallel_layers=config.layers_of_stages,
        enable_expert_parallel=config.enable_expert_parallel,
        cpu_isa=config.cpu_isa,
        logprobs_mode=config.logprobs_mode,
        max_logprobs=max(config.max_logprobs, MAX_CONTINUATIONS),
        enforce_eager=config.enforce_eager,
        deterministic=config.deterministic,
        quantization=config.quantization,
        tokenizer="" if config.tokenizer is None else str(Path(config.tokenizer).resolve()),
        logits_processors=list(config.logits_processors),
        link_timeout=config.worker_link_timeout,
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


def log_loaded(name: str, ready: wire.Ready, num_workers: int) -> None:
    """Log what the workers have loaded, and why they are slow, if they are."""
    _log.info(
        "model loaded",
        model=name,
        device=ready.device_name,
        computing=ready.computing,
        dtype=ready.dtype,
        max_model_len=ready.max_model_len,
        **({"workers": num_workers} if num_workers > 1 else {}),
        kv_cache_tokens=ready.num_pages * ready.page_size,
        **({"host_tokens": ready.num_host_pages * ready.page_size} if ready.num_host_pages else {}),
    )
    if ready.warning:
        _log.warning(ready.warning)
