"""Requests and responses of the endpoints that control the server."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from trioserve.http.api.schema.reading import Exclusive, about, hint, only
from trioserve.http.api.schema.refused_fields import Refusal
from trioserve.protocol.joining import WorkerRole

_RequestId = Annotated[str, msgspec.Meta(max_length=512)]


class PauseRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /pause_generation``; an empty one takes the defaults."""

    mode: Annotated[
        Literal["abort", "wait", "retract", "in_place", "keep"],
        about(
            "How running and queued requests are treated: `abort` ends them with the tokens "
            "that they have, `wait` lets them finish first, `retract` keeps their tokens and "
            "recomputes their KV afterwards, `in_place` keeps their KV, too, which vLLM calls "
            "`keep`."
        ),
    ] = "abort"
    clear_cache: Annotated[bool, about("Whether to empty the prefix cache as well.")] = False
    new_requests: Annotated[
        Literal["wait", "refuse"],
        about("Whether new requests wait in the queue or are refused with 503."),
    ] = "wait"


class ContinueRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /continue_generation``; it may be empty."""

    torch_empty_cache: Annotated[bool | None, hint()] = None


class Done(msgspec.Struct, kw_only=True):
    """Confirmation of an operation."""

    success: Annotated[bool, about("Always true.")] = True
    message: Annotated[str, about("The operation, in words for a person.")]


class PauseReply(msgspec.Struct, kw_only=True):
    """State of the pause."""

    is_paused: Annotated[bool, about("Whether the engine is paused.")]


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /abort_request``."""

    rid: Annotated[
        _RequestId,
        about(
            "The request's `rid`, `request_id` or `X-Request-Id`, or its beginning: all "
            "requests with that prefix are ended, including the members of a batch. It may be "
            "left out with `abort_all`."
        ),
    ] = ""
    abort_all: Annotated[bool, about("End all requests.")] = False
    finished_reason: Annotated[
        dict[str, Any] | None, only(refusal=Refusal.OTHER_FINISH_REASONS)
    ] = None
    abort_message: Annotated[str | None, only(refusal=Refusal.ABORT_MESSAGES)] = None


class AbortManyRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /abort_requests``."""

    request_ids: Annotated[
        Annotated[list[_RequestId], msgspec.Meta(min_length=1, max_length=10_000)],
        about("The whole ids of the requests that are to end."),
    ]


class WorkerEntry(msgspec.Struct, kw_only=True):
    """The state of one worker."""

    index: Annotated[int, about("Its number, from 0, which no other worker ever has.")]
    state: Annotated[
        str,
        about(
            "`starting` (it loads, and gets no requests yet), `running`, `stalled` (a step is so "
            "late that it may be hung), `draining` (it is being removed), `restarting`, "
            "`released` or `ended` (it was given up)."
        ),
    ]
    role: Annotated[
        str, about("Part of each request that it computes: `both`, `prefill` or `decode`.")
    ]
    device: Annotated[str, about("Name of its device; empty while the first process loads.")]
    pid: Annotated[int | None, about("Process id while it runs; null on another host.")]
    rank_pids: Annotated[
        list[int],
        about("Process ids of its ranks behind that one, in order; empty on another host."),
    ]
    host: Annotated[str | None, about("Name of its host; null if that is the engine's.")]
    restarts: Annotated[int, about("Number of its processes that were replaced.")]
    last_loss: Annotated[str | None, about("Reason of the last loss.")]
    num_running: Annotated[int, about("Sequences that are computed.")]
    num_waiting: Annotated[int, about("Sequences that wait for a slot.")]
    num_steps: Annotated[int, about("Steps computed since the start.")]
    pages_total: Annotated[int, about("Pages of its KV cache.")]
    pages_free: Annotated[int, about("Pages that hold nothing.")]
    pages_cached: Annotated[int, about("Cached pages that no running sequence holds.")]
    decode_ms: Annotated[
        float, about("Milliseconds that a step with one more stream is expected to take.")
    ]
    plan_bytes: Annotated[int, about("Bytes of all plans sent to it.")]
    round_trip_ms: Annotated[
        float | None,
        about("Milliseconds from the last heartbeat to its answer; null on the engine's host."),
    ]


class WorkerList(msgspec.Struct, kw_only=True):
    """The states of all workers."""

    workers: Annotated[list[WorkerEntry], about("The workers, by their index.")]


class AddWorkerRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /workers``; it may be empty."""

    device: Annotated[
        Annotated[str, msgspec.Meta(max_length=200)] | None,
        about(
            "The device: `cuda:1`, `cpu`, or a CPU's cores (`cpu:0-3+8-11`). By default the first "
            "one that no worker of this host has."
        ),
    ] = None
    role: Annotated[
        WorkerRole,
        about(
            "The part of each request that it computes, as in `--disaggregation`: `prefill`, "
            "`decode` or `both`."
        ),
    ] = "both"


class AbortReply(msgspec.Struct, kw_only=True):
    """Number of aborted requests."""

    num_aborted: Annotated[int, about("Requests that were ended; 0 if none had such a name.")]


class NewWeights(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of every request for other weights."""

    EXCLUSIVE: ClassVar[tuple[Exclusive, ...]] = (Exclusive(("mode", "abort_all_requests")),)

    mode: Annotated[
        Literal["wait", "abort", "retract", "rolling"] | None,
        about(
            "How running and queued requests are treated: `wait` (the default) lets them "
            "finish first, `abort` ends them with the tokens that they have, `retract` "
            "continues them with the new weights, `rolling` moves those of one worker after "
            "another to the other workers."
        ),
    ] = None
    abort_all_requests: Annotated[bool | None, about("SGLang's name of the mode `abort`.")] = None
    weight_version: Annotated[
        Annotated[str, msgspec.Meta(max_length=200)] | None,
        about("The version of the new weights; a checksum by default."),
    ] = None
    flush_cache: Annotated[bool | None, only(True, refusal=Refusal.OLD_CACHE)] = None
    load_format: Annotated[
        str | None, only("auto", "safetensors", "gguf", refusal=Refusal.OTHER_LOADERS)
    ] = None
    torch_empty_cache: Annotated[bool | None, hint()] = None


_WeightsPath = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class UpdateWeightsRequest(NewWeights, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /update_weights_from_disk``."""

    model_path: Annotated[
        _WeightsPath,
        about(
            "A folder, a GGUF file or a Hub id, or a single safetensors file with all "
            "tensors; it has to stay in place for later workers."
        ),
    ]
    keep_pause: Annotated[
        bool | None, about("Pause the engine once the new weights are loaded.")
    ] = None
    manifest: Annotated[dict[str, Any] | None, only(refusal=Refusal.UNCHECKED_TENSORS)] = None
    is_async: Annotated[bool | None, hint()] = None
    recapture_cuda_graph: Annotated[bool | None, hint()] = None
    token_step: Annotated[int | None, hint()] = None


class UpdateTensorsRequest(NewWeights, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /update_weights_from_tensor``."""

    EXCLUSIVE: ClassVar = (
        *NewWeights.EXCLUSIVE,
        Exclusive(("model_path", "serialized_named_tensors"), required=True),
    )

    model_path: Annotated[
        _WeightsPath | None,
        about(
            "A safetensors file with all tensors of the model, for example in shared memory "
            "(`/dev/shm`); it has to stay in place for later workers."
        ),
    ] = None
    serialized_named_tensors: Annotated[
        Any,
        only(refusal=Refusal.PICKLES),
    ] = None
    disable_draft_model: Annotated[bool | None, hint()] = None


class UpdateWeightVersionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /update_weight_version``."""

    new_version: Annotated[
        Annotated[str, msgspec.Meta(max_length=200)], about("The version of the weights.")
    ]
    abort_all_requests: Annotated[
        bool | None, about("End all requests with the tokens that they have.")
    ] = None


class WeightVersion(msgspec.Struct, kw_only=True):
    """Version of the served weights."""

    weight_version: Annotated[str, about("`default` for the weights that were loaded first.")]


_MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]


class MemoryRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /release_memory_occupation`` and of its counterpart; it may be empty."""

    tags: Annotated[
        _MemoryTag | list[_MemoryTag] | None,
        about("The memory that is meant; any value releases and resumes all of it."),
    ] = None
    level: Annotated[int | None, hint()] = None
    mode: Annotated[str | None, only("keep", refusal=Refusal.ENDING_AT_SLEEP)] = None


class SleepReply(msgspec.Struct, kw_only=True):
    """State of the worker's memory."""

    is_sleeping: Annotated[
        bool, about("Whether there is no worker until `/resume_memory_occupation` or `/wake_up`.")
    ]


class LoadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/load_lora_adapter``."""

    lora_name: Annotated[str, about("The adapter's name in requests.")]
    lora_path: Annotated[
        Annotated[str, msgspec.Meta(min_length=1, max_length=4096)],
        about(
            "The folder on the server's machine with its `adapter_config.json` and "
            "`adapter_model.safetensors`."
        ),
    ]
    load_inplace: Annotated[bool | None, only(False, refusal=Refusal.ADAPTER_REPLACEMENT)] = None
    is_3d_lora_weight: Annotated[Any, only(False, refusal=Refusal.EXPERT_ADAPTERS)] = None
    pinned: Annotated[bool | None, only(False, refusal=Refusal.PINNED_ADAPTERS)] = None
    added_tokens_config: Annotated[Any, only({}, refusal=Refusal.ADDED_TOKENS)] = None


class UnloadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/unload_lora_adapter``."""

    lora_name: Annotated[str, about("The adapter's name in requests.")]
    lora_int_id: Annotated[Any, only(refusal=Refusal.ADAPTER_NUMBERS)] = None
    lora_id: Annotated[Any, only(refusal=Refusal.ADAPTER_NUMBERS)] = None


class LoadedAdapters(msgspec.Struct, kw_only=True):
    """The loaded adapters."""

    success: Annotated[bool, about("Always true.")] = True
    loaded_adapters: Annotated[
        dict[str, str], about("The folders of the adapters that requests may name, by name.")
    ]


class FlushRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /flush_cache``; it may be empty."""

    timeout_s: Annotated[float | None, hint()] = None


class FlushReply(msgspec.Struct, kw_only=True):
    """Confirmation that the cache is empty, except for running requests."""

    success: Annotated[bool, about("Always true.")] = True
    num_pages_freed: Annotated[int, about("Pages of the KV cache that were freed.")]
