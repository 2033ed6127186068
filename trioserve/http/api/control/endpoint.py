"""Handlers for operators: pausing, aborting, weights, memory, adapters, the cache."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import quart

from trioserve.http.api.control.schemas import (
    AbortManyRequest,
    AbortReply,
    AbortRequest,
    AddWorkerRequest,
    ContinueRequest,
    Done,
    FlushReply,
    FlushRequest,
    LoadAdapterRequest,
    LoadedAdapters,
    MemoryRequest,
    NewWeights,
    PauseReply,
    PauseRequest,
    SleepReply,
    UnloadAdapterRequest,
    UpdateTensorsRequest,
    UpdateWeightsRequest,
    UpdateWeightVersionRequest,
    WeightVersion,
    WorkerEntry,
    WorkerList,
)
from trioserve.http.api.generations import renamed
from trioserve.http.api.openai.fields import ID_PREFIXES
from trioserve.http.api.service import Service, json_response
from trioserve.protocol.errors import InvalidRequest

MAX_DIGITS = 9
"""Most digits of a worker's number."""
_ADAPTER_NAMES = {"name": "lora_name", "path": "lora_path", "adapter": "lora_name"}
"""The endpoint's names of fields, by the engine's names of arguments."""


class ControlEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def pause_generation(self) -> quart.Response:
        """Handle ``POST /pause_generation`` and ``POST /pause``: answer once nothing runs."""
        request = await self._service.read_if_any(PauseRequest)
        mode = "in_place" if request.mode == "keep" else request.mode
        await self._service.server_api.pause(mode, refuse=request.new_requests == "refuse")
        if request.clear_cache:
            await self._service.server_api.flush_cache()
        return json_response(Done(message="nothing is computed until /continue_generation"))

    async def continue_generation(self) -> quart.Response:
        """Handle ``POST /continue_generation`` and ``POST /resume``."""
        await self._service.read_if_any(ContinueRequest)
        await self._service.server_api.resume()
        return json_response(Done(message="what waits is computed"))

    async def workers(self) -> quart.Response:
        """Handle ``GET /workers``."""
        reports = await self._service.server_api.workers()
        workers = [WorkerEntry(**attrs.asdict(each)) for each in reports]
        return json_response(WorkerList(workers=workers))

    async def add_worker(self) -> quart.Response:
        """Handle ``POST /workers``."""
        request = await self._service.read_if_any(AddWorkerRequest)
        report = await self._service.server_api.add_worker(request.device, request.role)
        return json_response(WorkerEntry(**attrs.asdict(report)))

    async def remove_worker(self, index: str) -> quart.Response:
        """Handle ``DELETE /workers/{index}``."""
        if not index.isdecimal() or len(index) > MAX_DIGITS:
            raise InvalidRequest(f"index must be a worker's number, got {index!r}", param="index")
        await self._service.server_api.remove_worker(int(index))
        return json_response(Done(message=f"worker {index} has ended"))

    async def is_paused(self) -> quart.Response:
        """Handle ``GET /is_paused``."""
        return json_response(PauseReply(is_paused=await self._service.server_api.paused()))

    async def abort_request(self) -> quart.Response:
        """Handle ``POST /abort_request``."""
        request = await self._service.read(AbortRequest)
        if request.abort_all:
            number = await self._service.server_api.abort([""], prefix=True)
        else:
            # An empty name names no request: aborting all requests needs abort_all.
            named = _names([request.rid]) if request.rid else []
            number = await self._service.server_api.abort(named, prefix=True)
        return json_response(AbortReply(num_aborted=number))

    async def abort_requests(self) -> quart.Response:
        """Handle ``POST /abort_requests``."""
        request = await self._service.read(AbortManyRequest)
        number = await self._service.server_api.abort(_names(request.request_ids), prefix=False)
        return json_response(AbortReply(num_aborted=number))

    async def update_weights_from_disk(self) -> quart.Response:
        """Handle ``POST /update_weights_from_disk``: answer once the new weights serve."""
        request = await self._service.read(UpdateWeightsRequest)
        version = await self._update_weights(request, request.model_path)
        if request.keep_pause:
            await self._service.server_api.pause("retract", refuse=False)
        return json_response(Done(message=f"the weights {version} serve"))

    async def update_weights_from_tensor(self) -> quart.Response:
        """Handle ``POST /update_weights_from_tensor``: update from tensors in a file."""
        request = await self._service.read(UpdateTensorsRequest)
        assert request.model_path is not None, "what else there may be is refused"
        version = await self._update_weights(request, request.model_path)
        return json_response(Done(message=f"the weights {version} serve"))

    async def _update_weights(self, request: NewWeights, path: str) -> str:
        """Load the weights at ``path`` and return their version."""
        mode = request.mode or ("abort" if request.abort_all_requests else "wait")
        try:
            return await self._service.server_api.update_weights(path, mode, request.weight_version)
        except InvalidRequest as error:
            raise renamed(error, {"model": "model_path"}) from error

    async def weight_version(self) -> quart.Response:
        """Handle ``GET /weight_version`` and ``GET /get_weight_version``."""
        return json_response(
            WeightVersion(weight_version=await self._service.server_api.weight_version())
        )

    async def update_weight_version(self) -> quart.Response:
        """Handle ``POST /update_weight_version``."""
        request = await self._service.read(UpdateWeightVersionRequest)
        server_api = self._service.server_api
        if request.abort_all_requests:
            await server_api.abort([""], prefix=True)
        await server_api.set_weights_version(request.new_version)
        return json_response(WeightVersion(weight_version=await server_api.weight_version()))

    async def release_memory_occupation(self) -> quart.Response:
        """Handle ``POST /release_memory_occupation``: answer once the worker has ended."""
        await self._service.read_if_any(MemoryRequest)
        await self._service.server_api.release_memory()
        return json_response(Done(message="the worker is gone until /resume_memory_occupation"))

    async def resume_memory_occupation(self) -> quart.Response:
        """Handle ``POST /resume_memory_occupation``: answer once a worker has loaded the model."""
        await self._service.read_if_any(MemoryRequest)
        await self._service.server_api.resume_memory()
        return json_response(Done(message="a worker is there, and what waits is computed"))

    async def is_sleeping(self) -> quart.Response:
        """Handle ``GET /is_sleeping``."""
        released = await self._service.server_api.memory_released()
        return json_response(SleepReply(is_sleeping=released))

    async def load_adapter(self) -> quart.Response:
        """Handle ``POST /v1/load_lora_adapter`` and ``POST /load_lora_adapter``."""
        request = await self._service.read(LoadAdapterRequest)
        name = request.lora_name
        if name in self._service.model_names:
            raise InvalidRequest(f"{name!r} is the model's own name", param="lora_name")
        try:
            await self._service.server_api.load_adapter(name, request.lora_path)
        except InvalidRequest as error:
            raise renamed(error, _ADAPTER_NAMES) from error
        return self._adapters()

    async def unload_adapter(self) -> quart.Response:
        """Handle ``POST /v1/unload_lora_adapter``: answer once no request uses the adapter."""
        request = await self._service.read(UnloadAdapterRequest)
        try:
            await self._service.server_api.unload_adapter(request.lora_name)
        except InvalidRequest as error:
            raise renamed(error, _ADAPTER_NAMES) from error
        return self._adapters()

    def _adapters(self) -> quart.Response:
        adapters = self._service.engine.adapters
        return json_response(LoadedAdapters(loaded_adapters={a.name: a.path for a in adapters}))

    async def flush_cache(self) -> quart.Response:
        """Handle ``GET`` or ``POST /flush_cache``, and ``POST /reset_prefix_cache``."""
        if quart.request.method == "POST":
            await self._service.read_if_any(FlushRequest)
        return json_response(
            FlushReply(num_pages_freed=await self._service.server_api.flush_cache())
        )


def _names(ids: Sequence[str]) -> list[str]:
    """Return the engine's names of requests, given by their clients' ids or by the answers'."""
    return [kind + id for id in ids for kind in ("", *ID_PREFIXES)]
