"""The options of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trioserve.config.adapter_paths import named_paths
from trioserve.config.options import option
from trioserve.config.override import parse_override
from trioserve.protocol.errors import InvalidRequest

__all__ = ["EngineConfig"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "none", "int8", "int4", "w8a8")
MODEL_IMPLEMENTATIONS = ("auto", "native", "transformers")
DEVICES = ("auto", "cpu", "cuda")
SCHEDULING_POLICIES = ("fcfs", "lpm", "priority")
CAPACITY_POLICIES = ("max_utilization", "guaranteed_no_evict")
LOGPROBS_MODES = ("raw", "processed")
KV_CACHE_DTYPES = ("auto", "fp8")
PREFIX_CACHE_SCOPES = ("server", "key")


@attrs.frozen(kw_only=True)
class EngineConfig:
    """How an engine loads and runs one model.

    None means "chosen from the machine and the model".

    Raises:
        InvalidRequest: a value isn't allowed; ``param`` names the option.
    """

    model: str = attrs.field(kw_only=False)
    """A known name (``smollm2-135m``), a folder, a GGUF file or a Hugging Face Hub id."""

    tokenizer: str | None = option(
        None,
        "folder or tokenizer.json to use instead of the model's own tokenizer",
        group="model",
        metavar="PATH",
    )
    chat_template: str | None = option(
        None, "file with a jinja2 chat template, or the template itself", group="model"
    )
    revision: str | None = option(None, "branch, tag or commit of a Hub model", group="model")
    model_impl: str = option(
        "auto",
        "what computes the model: native has a file for some families, transformers has many more "
        "and is slower, auto takes native where it can",
        choices=MODEL_IMPLEMENTATIONS,
        group="model",
    )
    dtype: str = option(
        "auto", "number format of weights and activations", choices=DTYPES, group="model"
    )
    quantization: str = option(
        "auto",
        "number format of the weights on a CPU: auto keeps a GGUF file's 4 and 8 bits where dtype "
        "is auto, none computes with dtype, int8 and int4 round any model's weights, w8a8 rounds "
        "weights and activations to 8 bits",
        choices=QUANTIZATIONS,
        group="model",
    )
    skip_tokenizer_init: bool = option(
        False,
        "load no tokenizer: prompts are token ids, and outputs have no text",
        group="model",
        kind=bool,
    )
    device: str = option("auto", "where the worker computes", choices=DEVICES, group="model")
    max_model_len: int | None = option(
        None,
        "longest sequence, prompt and output together, in tokens (default: the model's own)",
        group="model",
        kind=int,
        low=1,
    )
    seed: int | None = option(
        None,
        "seed of requests that bring none (default: fresh entropy for each request)",
        group="model",
        kind=int,
    )
    generation_config: str = option(
        "auto",
        "source of the sampling defaults: auto is the model's own generation_config.json, vllm is "
        "none, a folder is the file in it, whose max_new_tokens is a limit for all requests",
        group="model",
        metavar="auto|vllm|PATH",
    )
    override_generation_config: str | None = option(
        None,
        "JSON object of defaults that replace those of the generation config, as in "
        '{"temperature": 0.5}; its max_new_tokens is a limit for all requests',
        group="model",
        metavar="JSON",
    )
    max_tokens_default: int | None = option(
        None,
        "output tokens of a request that names no max_tokens, as far as they fit; a request may "
        "name more (default: max_new_tokens of the generation config, else as many as fit)",
        group="model",
        kind=int,
        low=1,
    )
    logprobs_mode: str = option(
        "raw",
        "report log-probabilities of the model's raw distribution or of the one sampled from",
        choices=LOGPROBS_MODES,
        group="model",
    )
    max_logprobs: int = option(
        20,
        "most log-probabilities a request may ask for per token",
        group="model",
        kind=int,
        low=0,
    )

    logits_processors: tuple[str, ...] = option(
        (),
        "class of your own that changes logits before a token is drawn; may be given several times",
        group="model",
        metavar="MODULE:CLASS",
        repeatable=True,
    )
    grammar_timeout: float = option(
        10.0,
        "seconds that compiling a request's JSON schema, regex or grammar may take",
        group="model",
        kind=float,
        above=0,
    )

    enable_lora: bool = option(
        False,
        "serve LoRA adapters, also such as are loaded while the server runs; lora_modules do so by "
        "themselves",
        group="adapters",
        kind=bool,
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "adapter to load at the start, from a folder as PEFT writes it, and the name that requests "
        "give it, or vLLM's JSON object with name and path; may be given several times",
        group="adapters",
        metavar="NAME=PATH",
        repeatable=True,
        form=(
            r"[^={]+=.+|\{.+\}",
            "a name and a folder, as in mine=/adapters/mine, or JSON with name and path",
        ),
    )
    max_loras: int = option(
        8,
        "most different adapters among the sequences that are computed together",
        group="adapters",
        kind=int,
        low=1,
        high=1024,
    )
    max_lora_rank: int = option(
        64, "largest rank of an adapter", group="adapters", kind=int, low=1, high=4096
    )
    max_cpu_loras: int | None = option(
        None,
        "most adapters in the worker's memory; of more that are loaded, those not used for the "
        "longest time are read again when they are wanted (default: 32; never below max_loras)",
        group="adapters",
        kind=int,
        low=1,
    )

    max_num_seqs: int = option(
        256, "most sequences that are computed together", group="scheduling", kind=int, low=1
    )
    max_num_batched_tokens: int | None = option(
        None,
        "most tokens computed in one step; longer prompts are prefilled in chunks, which on a CPU "
        "take no more than a sixth while others decode (default: 256 on a CPU, 2048 on a GPU)",
        group="scheduling",
        kind=int,
        low=1,
    )
    max_num_queued_reqs: int = option(
        2048,
        "most requests that may wait before new ones are refused with 429",
        group="scheduling",
        kind=int,
        low=1,
    )
    max_num_queued_tokens: int | None = option(
        None,
        "most tokens that the prompts of waiting requests may have before new ones are refused "
        "with 429 (default: 2,097,152, or the longest sequence where that is more)",
        group="scheduling",
        kind=int,
        low=1,
    )
    default_timeout: float | None = option(
        None,
        "seconds that a request may take which names no timeout of its own; the answer past it "
        "is 504 (default: any time)",
        group="scheduling",
        kind=float,
        above=0,
    )
    scheduling_policy: str = option(
        "fcfs",
        "order of waiting requests: arrival, longest cached prefix first, or priority",
        choices=SCHEDULING_POLICIES,
        group="scheduling",
    )
    capacity_policy: str = option(
        "max_utilization",
        "admit while pages last and preempt by recompute, "
        "or admit only what can never be preempted",
        choices=CAPACITY_POLICIES,
        group="scheduling",
    )
    max_plans_in_flight: int | None = option(
        None,
        "steps sent ahead of their results (default: 1 on a CPU, 2 on a GPU)",
        group="scheduling",
        kind=int,
        low=1,
    )

    block_size: int = option(
        16, "tokens in one page of the KV cache", group="memory", kind=int, low=1, high=65536
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of the KV cache: auto is the model's own, "
        "fp8 (e4m3 with scales, on a GPU only) takes half the memory",
        choices=KV_CACHE_DTYPES,
        group="memory",
    )
    num_gpu_blocks_override: int | None = option(
        None,
        "pages in the KV cache, instead of as many as the memory holds",
        group="memory",
        kind=int,
        low=1,
        high=2**31 - 1,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "memory of the KV cache (default: what is free on a GPU, 2GiB at most on a CPU)",
        group="memory",
        kind=int,
        low=1,
        in_bytes=True,
    )
    kv_offloading_bytes: int | None = option(
        None,
        "memory of the host for cached pages that the KV cache has no room for any more; for a "
        "GPU, whose memory is the smaller (default: none)",
        group="memory",
        kind=int,
        low=1,
        in_bytes=True,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of a GPU's memory that this engine may use",
        group="memory",
        kind=float,
        above=0,
        high=1,
    )
    enable_prefix_caching: bool = option(
        True,
        "keep the KV of finished requests for prompts that begin alike",
        group="memory",
        kind=bool,
    )
    prefix_cache_scope: str = option(
        "server",
        "which requests share that KV: all of the server, or, where there are several API keys, "
        "those of a key",
        choices=PREFIX_CACHE_SCOPES,
        group="memory",
    )
    max_sessions: int = option(
        256,
        "sessions that may be open, with the turns that they remember",
        group="memory",
        kind=int,
        low=0,
        high=100_000,
    )
    max_stream_bytes: int = option(
        1 << 20,
        "output that may wait for one slow reader before it is aborted",
        group="memory",
        kind=int,
        low=1024,
        in_bytes=True,
    )
    max_total_stream_bytes: int = option(
        256 << 20,
        "output that may wait for all slow readers together, and bytes of answers that all "
        "connections together may leave unread",
        group="memory",
        kind=int,
        low=1024,
        in_bytes=True,
    )

    num_threads: int | None = option(
        None,
        "threads the worker computes with on a CPU (default: the cores it may use)",
        group="worker",
        kind=int,
        low=1,
        high=1024,
    )
    enforce_eager: bool = option(
        False,
        "launch a GPU's kernels one by one instead of whole decode steps as CUDA graphs",
        group="worker",
        kind=bool,
    )
    deterministic: bool = option(
        False,
        "compute a sequence alike whatever else is in its batch: on a CPU its tokens are the same, "
        "bit for bit; on a GPU its attention is, matrix products may differ",
        group="worker",
        kind=bool,
    )
    worker_start_timeout: float = option(
        600.0,
        "seconds a worker may take to load its model without any progress",
        group="worker",
        kind=float,
        low=1,
    )
    watchdog_timeout: float = option(
        60.0,
        "seconds a step may take beyond the slowest so far, and more for one larger than those "
        "that came back, before the worker counts as hung and is replaced; as long may what "
        "else it is asked for take, and a front end give no sign of life; 0 waits for ever",
        group="worker",
        kind=float,
        low=0,
    )
    max_worker_restarts: int = option(
        3,
        "deaths of the worker without progress between them before the engine gives up",
        group="worker",
        kind=int,
        low=0,
    )

    metrics_prefix: str = option(
        "trioserve",
        "what metrics' names begin with; vllm for dashboards that are made for it",
        group="log",
        metavar="WORD",
        form=(
            r"[A-Za-z_][A-Za-z0-9_]{0,63}",
            "a word of letters, digits and underscores, 64 at most, no digit first",
        ),
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "where a span of each request is sent, by OpenTelemetry's protocol over HTTP; "
        "needs the extra otel (default: $OTEL_EXPORTER_OTLP_TRACES_ENDPOINT)",
        group="log",
        metavar="URL",
        form=(r"https?://[^\s/]\S*", "a URL that begins with http:// or https://"),
    )

    def __attrs_post_init__(self) -> None:
        named_paths(self.lora_modules)
        parse_override(self.override_generation_config)
        if self.kv_offloading_bytes is not None and not self.enable_prefix_caching:
            raise InvalidRequest(
                "kv_offloading_bytes needs a prefix cache (--enable-prefix-caching)",
                param="kv_offloading_bytes",
            )

    @property
    def serves_adapters(self) -> bool:
        """Whether requests may name adapters."""
        return self.enable_lora or bool(self.lora_modules)

    @classmethod
    def of(cls, model: str | EngineConfig, options: Mapping[str, Any]) -> EngineConfig:
        """The configuration of ``model``, or ``model`` itself if it is one, with ``options``."""
        if isinstance(model, EngineConfig):
            return attrs.evolve(model, **options)
        return cls(model, **options)
