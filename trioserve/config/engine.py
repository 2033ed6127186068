"""The options of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trioserve.config.adapter_paths import named_paths
from trioserve.config.options import option
from trioserve.config.override import parse_override
from trioserve.config.speculation import parse_speculative
from trioserve.config.worker_group import WorkerGroupOptions
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.machine import KERNEL_ISAS

SCHEDULING_POLICIES = ("fcfs", "lpm", "priority")
CAPACITY_POLICIES = ("max_utilization", "guaranteed_no_evict")
KV_CACHE_DTYPES = ("auto", "fp8")
PREFIX_CACHE_SCOPES = ("server", "key")


HANDOVER_BYTES = 1 << 30
"""Bytes of the host's memory for pages on their way between workers, if no option says."""


@attrs.frozen(kw_only=True)
class EngineConfig(WorkerGroupOptions):
    """Options of an engine that runs one model.

    None means "chosen from the machine and the model".

    Raises:
        InvalidRequest: A value isn't allowed; ``param`` names the option.
    """

    max_num_seqs: int = option(
        256,
        "most sequences that are computed together",
        group="scheduling",
        page="overload#What to set",
        common=True,
        kind=int,
        low=1,
    )
    max_num_batched_tokens: int | None = option(
        None,
        "most tokens computed in one step; a longer prompt is prefilled in chunks",
        unset="1024 on a CPU, 2048 on a GPU",
        group="scheduling",
        page="performance#Long prompts beside running streams",
        common=True,
        kind=int,
        low=1,
    )
    itl_target_ms: float | None = option(
        None,
        "milliseconds between two tokens of a stream that chunks of prompts may cause; prompts "
        "that are delayed more than tenfold may cause more",
        unset="twice the time without prompts, more the more prompts delay each other; "
        "a short burst is computed at once",
        group="scheduling",
        page="performance#Long prompts beside running streams",
        kind=float,
        low=1,
    )
    max_num_queued_reqs: int = option(
        2048,
        "most requests that may wait; further ones are refused with 429",
        group="scheduling",
        page="overload#The queue",
        common=True,
        kind=int,
        low=1,
    )
    max_num_queued_tokens: int | None = option(
        None,
        "most tokens in the prompts of all waiting requests; further requests are refused with 429",
        unset="2,097,152, or the longest sequence where that is more",
        group="scheduling",
        page="overload#The queue",
        kind=int,
        low=1,
    )
    default_timeout: float | None = option(
        None,
        "seconds that a request without a timeout of its own may take; past them it is "
        "answered with 504",
        unset="no limit",
        group="scheduling",
        page="overload#Deadlines",
        kind=float,
        above=0,
    )
    scheduling_policy: str = option(
        "fcfs",
        "order of waiting requests: arrival (fcfs), longest cached prefix first (lpm), or priority",
        choices=SCHEDULING_POLICIES,
        group="scheduling",
        page="overload#The queue",
    )
    capacity_policy: str = option(
        "max_utilization",
        "admit requests while pages last and preempt by recompute (max_utilization), or admit "
        "only requests that are never preempted (guaranteed_no_evict)",
        choices=CAPACITY_POLICIES,
        group="scheduling",
        page="architecture#The step",
    )
    max_plans_in_flight: int | None = option(
        None,
        "steps sent to the worker ahead of their results",
        unset="1 on a CPU, 2 on a GPU, one more than there are stages",
        group="scheduling",
        page="architecture#The step",
        kind=int,
        low=1,
    )

    speculative_config: str | None = option(
        None,
        "speculative decoding: a JSON object with method (suffix, ngram or draft_model), model, "
        "quantization, num_speculative_tokens, prompt_lookup_min, prompt_lookup_max and adaptive",
        unset="none",
        group="scheduling",
        page="speculation#Options",
        metavar="OBJECT",
    )

    block_size: int = option(
        16,
        "tokens in one page of the KV cache",
        group="memory",
        page="kv-cache#The prefix cache",
        kind=int,
        low=1,
        high=65536,
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of the KV cache: auto is the model's own, fp8 (e4m3 with scales, on a "
        "GPU only) takes half the memory",
        choices=KV_CACHE_DTYPES,
        group="memory",
        common=True,
    )
    num_gpu_blocks_override: int | None = option(
        None,
        "pages of the KV cache",
        unset="as many as its memory holds",
        group="memory",
        page="kv-cache#The host's memory",
        kind=int,
        low=1,
        high=2**31 - 1,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "memory of the KV cache",
        unset="what is free on a GPU, at most 2GiB on a CPU",
        group="memory",
        page="kv-cache#The host's memory",
        common=True,
        kind=int,
        low=1,
        in_bytes=True,
    )
    process_memory_limit: int | None = option(
        None,
        "most bytes of weights and KV cache in each process of a worker, on a CPU; a model that "
        "needs more is refused before it is read",
        unset="none",
        group="memory",
        page="tensor-parallel#Memory",
        kind=int,
        low=1,
        in_bytes=True,
    )
    kv_offloading_bytes: int | None = option(
        None,
        "host memory for cached pages that the KV cache has no room for; for a GPU, whose own "
        "memory is smaller",
        unset="none",
        group="memory",
        page="kv-cache#The host's memory",
        kind=int,
        low=1,
        in_bytes=True,
    )
    kv_offloading_dir: str | None = option(
        None,
        "folder for pages that were copied to the host's memory; they are kept over restarts",
        unset="none",
        group="memory",
        page="kv-cache#The disk",
    )
    kv_offloading_dir_bytes: int = option(
        10 << 30,
        "the most bytes of pages in --kv-offloading-dir, for each model and number format",
        group="memory",
        page="kv-cache#The disk",
        kind=int,
        low=1,
        in_bytes=True,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of a GPU's memory that this engine may use",
        group="memory",
        page="architecture#A step on a GPU",
        common=True,
        kind=float,
        above=0,
        high=1,
    )
    enable_prefix_caching: bool = option(
        True,
        "keep the KV of finished requests, and reuse it for prompts that begin alike",
        group="memory",
        page="kv-cache#The prefix cache",
        kind=bool,
    )
    prefix_cache_scope: str = option(
        "server",
        "requests that share cached prefixes: all requests of the server, or those with the "
        "same API key",
        choices=PREFIX_CACHE_SCOPES,
        group="memory",
        page="kv-cache#The prefix cache",
    )
    max_sessions: int = option(
        256,
        "most open sessions; further ones are refused with 429",
        group="memory",
        page="sessions#Sessions",
        kind=int,
        low=0,
        high=100_000,
    )
    max_stream_bytes: int = option(
        1 << 20,
        "most output that may wait for one slow reader; past it the request is aborted",
        group="memory",
        page="overload#Slow readers",
        kind=int,
        low=1024,
        in_bytes=True,
    )
    max_total_stream_bytes: int = option(
        256 << 20,
        "most output that may wait for all slow readers together, and most bytes of responses "
        "that all connections together may leave unread",
        group="memory",
        page="overload#Slow readers",
        kind=int,
        low=1024,
        in_bytes=True,
    )

    max_output_tensor_bytes: int = option(
        64 << 20,
        "most bytes of hidden states and logits that a request may ask for, at most 128MiB",
        group="memory",
        page="output-tensors#The bound",
        kind=int,
        low=0,
        high=128 << 20,
        in_bytes=True,
    )

    num_threads: int | None = option(
        None,
        "threads that each worker computes with on a CPU",
        unset="its share of the cores that may be used",
        group="worker",
        page="architecture#A step on a CPU",
        common=True,
        kind=int,
        low=1,
        high=1024,
    )
    cpu_isa: str = option(
        "auto",
        "instruction set of a CPU's compiled kernels; auto takes the processor's fastest",
        group="worker",
        page="performance#Instruction sets",
        choices=("auto", *KERNEL_ISAS),
    )
    enforce_eager: bool = option(
        False,
        "launch a GPU's kernels one by one, not whole decode steps as CUDA graphs",
        group="worker",
        page="architecture#A step on a GPU",
        kind=bool,
    )
    deterministic: bool = option(
        False,
        "compute a sequence independently of its batch: on a CPU its tokens are the same, bit "
        "for bit; on a GPU its attention is, but matrix products may differ",
        group="worker",
        page="models#Native families",
        kind=bool,
    )
    worker_start_timeout: float = option(
        600.0,
        "seconds without progress that a worker may take to load its model; past them it is ended",
        group="worker",
        page="architecture#The worker's life",
        kind=float,
        low=1,
    )
    watchdog_timeout: float = option(
        60.0,
        "seconds that a step may take beyond the slowest one so far, more for a larger step, "
        "before the worker counts as hung and is replaced; also the limit for other calls to "
        "the worker and for the heartbeat of a front end; 0 sets no limit",
        group="worker",
        page="reliability#What is promised",
        kind=float,
        low=0,
    )
    max_worker_restarts: int = option(
        3,
        "replacements of a dead worker in a row, without progress between them; the engine gives "
        "up at the next death",
        group="worker",
        page="reliability#What is promised",
        kind=int,
        low=0,
    )

    metrics_prefix: str = option(
        "trioserve",
        "first word of every metric's name; vllm is for dashboards that expect vLLM's metrics",
        group="log",
        page="observability#Metrics",
        metavar="WORD",
        form=(
            r"[A-Za-z_][A-Za-z0-9_]{0,63}",
            "a word of letters, digits and underscores, 64 at most, no digit first",
        ),
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL to send a span of each request to, by OpenTelemetry's protocol over HTTP; needs "
        "the extra otel",
        unset="$OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        group="log",
        page="observability#Spans",
        metavar="URL",
        form=(r"https?://[^\s/]\S*", "a URL that begins with http:// or https://"),
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        named_paths(self.lora_modules)
        parse_override(self.override_generation_config)
        parse_speculative(self.speculative_config)
        if self.kv_offloading_dir is not None and self.kv_offloading_bytes is None:
            raise InvalidRequest(
                "kv_offloading_dir needs memory of the host (--kv-offloading-bytes), through which "
                "pages go to the disk",
                param="kv_offloading_dir",
            )
        for name in ("kv_offloading_bytes", "disaggregation"):
            if getattr(self, name) and not self.enable_prefix_caching:
                raise InvalidRequest(
                    f"{name} needs a prefix cache (--enable-prefix-caching)", param=name
                )

    @property
    def lends_pages(self) -> bool:
        """True if the workers lend each other pages of their prefix caches, if they can.

        The pages go through the host's memory.
        """
        return self.kv_host_bytes > 0

    @property
    def kv_host_bytes(self) -> int:
        """Bytes of the host's memory for pages; there are some if workers hand pages over."""
        return self.kv_offloading_bytes or (HANDOVER_BYTES if self.disaggregation else 0)

    @property
    def serves_adapters(self) -> bool:
        """True if requests may name adapters."""
        return self.enable_lora or bool(self.lora_modules)

    @classmethod
    def of(cls, model: str | EngineConfig, options: Mapping[str, Any]) -> EngineConfig:
        """Return the configuration of ``model``, which may already be one, with ``options``."""
        if isinstance(model, EngineConfig):
            return attrs.evolve(model, **options)
        return cls(model, **options)
