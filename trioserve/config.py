"""Every option of the engine and of the server: the one list for Python, the command line and the
environment.

An option is an attrs field made by :func:`option`. Its name gives all three spellings:
``max_num_seqs`` in Python, ``--max-num-seqs`` on the command line and ``TRIOSERVE_MAX_NUM_SEQS`` in
the environment. Names follow vLLM's where it has the option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from trioserve.errors import InvalidRequest

__all__ = ["EngineConfig", "Option", "ServerConfig", "environment_name", "flag_name", "options_of"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
SCHEDULING_POLICIES = ("fcfs", "lpm", "priority")
CAPACITY_POLICIES = ("max_utilization", "guaranteed_no_evict")
LOGPROBS_MODES = ("raw", "processed")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "console", "json")


@attrs.frozen
class Option:
    """What the command line and the documentation need to know of one field.

    ``parse`` turns the text of a flag or an environment variable into the field's value; it is
    ``bool`` for a flag that takes ``--x`` and ``--no-x``.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    group: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    repeatable: bool = False


def _check_choice(choices: tuple[str, ...]) -> Any:
    def check(_: object, attribute: attrs.Attribute[str], value: str) -> None:
        if value not in choices:
            allowed = ", ".join(choices)
            raise InvalidRequest(
                f"{attribute.name} must be one of {allowed}; got {value!r}", param=attribute.name
            )

    return check


def at_least(low: float) -> Any:
    """A validator: the value, unless None, is a number of at least ``low``."""

    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < low:
            raise InvalidRequest(
                f"{attribute.name} must be at least {low}; got {value!r}", param=attribute.name
            )

    return check


def _fraction(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise InvalidRequest(
            f"{attribute.name} must be above 0 and at most 1; got {value!r}", param=attribute.name
        )


def option(
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] = str,
    group: str = "engine",
    metavar: str | None = None,
    choices: tuple[str, ...] | None = None,
    repeatable: bool = False,
    validator: Any = None,
) -> Any:
    """An attrs field that is also a flag and an environment variable."""
    if choices is not None:
        validator = _check_choice(choices)
    metadata = {
        "parse": parse,
        "help": help,
        "group": group,
        "metavar": metavar,
        "choices": choices,
        "repeatable": repeatable,
    }
    if repeatable:
        return attrs.field(default=default, metadata=metadata, converter=tuple, validator=validator)
    return attrs.field(default=default, metadata=metadata, validator=validator)


@attrs.frozen(kw_only=True)
class EngineConfig:
    """How an engine loads and runs one model. None means "chosen from the machine and the model"."""

    model: str = attrs.field(kw_only=False)
    """A known name (``smollm2-135m``), a folder, a GGUF file or a Hugging Face Hub id."""

    tokenizer: str | None = option(
        None, "folder or tokenizer.json to use instead of the model's own tokenizer", group="model"
    )
    chat_template: str | None = option(
        None, "file with a jinja2 chat template, or the template itself", group="model"
    )
    revision: str | None = option(None, "branch, tag or commit of a Hub model", group="model")
    dtype: str = option("auto", "number format of weights and activations", choices=DTYPES, group="model")
    device: str = option("auto", "where the worker computes", choices=DEVICES, group="model")
    max_model_len: int | None = option(
        None,
        "longest sequence, prompt and output together, in tokens (default: the model's own)",
        parse=int, group="model", validator=at_least(1),
    )
    seed: int | None = option(
        None,
        "seed of requests that bring none (default: fresh entropy for each request)",
        parse=int, group="model",
    )
    logprobs_mode: str = option(
        "raw",
        "report log-probabilities of the model's raw distribution or of the one sampled from",
        choices=LOGPROBS_MODES, group="model",
    )
    max_logprobs: int = option(
        20, "most log-probabilities a request may ask for per token",
        parse=int, group="model", validator=at_least(0),
    )

    max_num_seqs: int = option(
        256, "most sequences that are computed together", parse=int, validator=at_least(1),
        group="scheduling",
    )
    max_num_batched_tokens: int | None = option(
        None,
        "most tokens computed in one step; longer prompts are prefilled in chunks "
        "(default: 512 on a CPU, 8192 on a GPU)",
        parse=int, group="scheduling", validator=at_least(1),
    )
    max_num_queued_reqs: int = option(
        2048, "most requests that may wait before new ones are refused with 429",
        parse=int, group="scheduling", validator=at_least(1),
    )
    scheduling_policy: str = option(
        "fcfs", "order of waiting requests: arrival, longest cached prefix first, or priority",
        choices=SCHEDULING_POLICIES, group="scheduling",
    )
    capacity_policy: str = option(
        "max_utilization",
        "admit while pages last and preempt by recompute, or admit only what can never be preempted",
        choices=CAPACITY_POLICIES, group="scheduling",
    )
    max_plans_in_flight: int | None = option(
        None, "steps sent ahead of their results (default: 1 on a CPU, 2 on a GPU)",
        parse=int, group="scheduling", validator=at_least(1),
    )

    block_size: int = option(
        16, "tokens in one page of the KV cache", parse=int, group="memory", validator=at_least(1)
    )
    num_gpu_blocks_override: int | None = option(
        None, "pages in the KV cache, instead of as many as the memory holds",
        parse=int, group="memory", validator=at_least(1),
    )
    kv_cache_memory_bytes: int | None = option(
        None, "bytes for the KV cache (default: what is free on a GPU, 2 GiB at most on a CPU)",
        parse=int, group="memory", validator=at_least(1),
    )
    gpu_memory_utilization: float = option(
        0.9, "share of a GPU's memory that this engine may use",
        parse=float, group="memory", validator=_fraction,
    )
    enable_prefix_caching: bool = option(
        True, "keep the KV of finished requests for prompts that begin alike", parse=bool,
        group="memory",
    )
    max_stream_bytes: int = option(
        1 << 20, "bytes of output that may wait for one slow reader before it is aborted",
        parse=int, group="memory", validator=at_least(1024),
    )
    max_total_stream_bytes: int = option(
        256 << 20, "bytes of output that may wait for all slow readers together",
        parse=int, group="memory", validator=at_least(1024),
    )

    num_threads: int | None = option(
        None, "threads the worker computes with on a CPU (default: the cores it may use)",
        parse=int, group="worker", validator=at_least(1),
    )
    worker_start_timeout: float = option(
        600.0, "seconds a worker may take to load its model without any progress",
        parse=float, group="worker", validator=at_least(1),
    )
    max_worker_restarts: int = option(
        3, "deaths of the worker without progress between them before the engine gives up",
        parse=int, group="worker", validator=at_least(0),
    )


@attrs.frozen(kw_only=True)
class ServerConfig:
    """How the HTTP server listens and what it allows."""

    engine: EngineConfig
    served_model_name: tuple[str, ...] = option(
        (), "name that clients use for the model; may be given several times",
        group="http", metavar="NAME", repeatable=True,
    )
    host: str = option("127.0.0.1", "address to listen on", group="http")
    port: int = option(8000, "port to listen on; 0 picks a free one", parse=int, group="http",
                       validator=at_least(0))
    uds: str | None = option(None, "Unix socket to listen on instead of a port", group="http",
                             metavar="PATH")
    api_key: tuple[str, ...] = option(
        (), "key that clients must send as a bearer token; may be given several times",
        group="http", metavar="KEY", repeatable=True,
    )
    root_path: str = option("", "path prefix that a proxy in front takes off", group="http")
    max_body_size: int = option(
        32 << 20, "largest request body in bytes (413 past it)", parse=int, group="http",
        validator=at_least(1),
    )
    keep_alive_interval: float = option(
        15.0, "seconds of silence on an event stream before a comment line is sent",
        parse=float, group="http", validator=at_least(0.01),
    )
    send_timeout: float = option(
        30.0, "seconds a client may leave the server's bytes unread before it is cut off",
        parse=float, group="http", validator=at_least(0.01),
    )
    shutdown_timeout: float = option(
        30.0, "seconds that running requests get to finish on Ctrl-C or SIGTERM",
        parse=float, group="http", validator=at_least(0),
    )
    log_level: str = option("info", "least important message to log", choices=LOG_LEVELS, group="log")
    log_format: str = option(
        "auto", "console for people, json for machines, auto by whether stderr is a terminal",
        choices=LOG_FORMATS, group="log",
    )


def flag_name(name: str) -> str:
    """``max_num_seqs`` as ``--max-num-seqs``."""
    return "--" + name.replace("_", "-")


def environment_name(name: str) -> str:
    """``max_num_seqs`` as ``TRIOSERVE_MAX_NUM_SEQS``."""
    return "TRIOSERVE_" + name.upper()


def options_of(cls: type[EngineConfig] | type[ServerConfig]) -> Iterator[Option]:
    """The options that ``cls`` defines, in the order in which it defines them."""
    for field in attrs.fields(cls):
        if "help" in field.metadata:
            yield Option(name=field.name, default=field.default, **field.metadata)


def split_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort ``values`` into those of :class:`EngineConfig` and those of :class:`ServerConfig`.

    Raises:
        InvalidRequest: a name is an option of neither.
    """
    engine_names = {field.name for field in attrs.fields(EngineConfig)}
    server_names = {field.name for field in attrs.fields(ServerConfig)}
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}
    for name, value in values.items():
        if name in engine_names:
            engine[name] = value
        elif name in server_names:
            server[name] = value
        else:
            raise InvalidRequest(f"there is no option {name!r}", param=name)
    return engine, server
