"""Handlers of questions about the server: its version, load, options, model and health."""

from __future__ import annotations

import re
from typing import Any

import attrs
import quart

from trioserve.config import ServerConfig
from trioserve.config.options import options_of
from trioserve.http.api.service import Service, json_response
from trioserve.http.api.utilities.schemas import (
    HealthReply,
    Load,
    ModelInfo,
    SchedulerLoad,
    ServerInfo,
    VersionReply,
    Welcome,
    WorkerInfo,
)
from trioserve.observability.statistics import EngineStatistics
from trioserve.protocol.errors import DeadlineExceeded, Draining, EngineError, QueueFull, WorkerLost
from trioserve.protocol.sampling import SamplingParams
from trioserve.protocol.version import __version__
from trioserve.requests.prompts import TokensPrompt

HEALTH_TIMEOUT = 20.0
"""Seconds that ``/health_generate`` waits for its token, as in SGLang."""
_BEFORE_ALL = -(2**31)
"""Priority of a request that runs before all others."""
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


class UtilityEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def welcome(self) -> quart.Response:
        """Handle ``GET /``."""
        prefix = self._service.config.root_path
        return json_response(
            Welcome(
                name="trioserve",
                version=__version__,
                description=f"{prefix}/openapi.json",
            )
        )

    async def version(self) -> quart.Response:
        """Handle ``GET /version``."""
        return json_response(VersionReply(__version__))

    async def load(self) -> quart.Response:
        """Handle ``GET /load``."""
        statistics = await self._service.server_api.statistics()
        load = self._scheduler_load(statistics)
        return json_response(
            Load(
                server_load=statistics.num_streams,
                num_reqs=load.num_reqs,
                num_running_reqs=statistics.scheduler.num_running,
                num_waiting_reqs=load.num_waiting_reqs,
                num_tokens=load.num_tokens,
                max_total_num_tokens=self._max_total_num_tokens(),
            )
        )

    async def get_load(self) -> quart.Response:
        """Handle ``GET /get_load``: a list, as SGLang's has one entry for each scheduler."""
        return json_response([self._scheduler_load(await self._service.server_api.statistics())])

    async def server_info(self) -> quart.Response:
        """Handle ``GET /server_info`` and ``GET /get_server_info``."""
        service, ready = self._service, self._service.engine.ready
        return json_response(
            ServerInfo(
                version=__version__,
                model=service.engine.model_name,
                served_model_name=list(service.model_names),
                max_model_len=service.engine.max_model_len,
                max_total_num_tokens=self._max_total_num_tokens(),
                default_sampling_params=service.engine.generation.shown(),
                page_size=ready.page_size,
                worker=WorkerInfo(
                    device=ready.device,
                    device_name=ready.device_name,
                    computing=ready.computing,
                    dtype=ready.dtype,
                    num_pages=ready.num_pages,
                    page_size=ready.page_size,
                    max_num_seqs=ready.max_num_seqs,
                    max_num_batched_tokens=ready.max_num_batched_tokens,
                ),
                options=shown_options(attrs.evolve(service.config, engine=service.engine.config)),
            )
        )

    async def model_info(self) -> quart.Response:
        """Handle ``GET /model_info`` and ``GET /get_model_info``."""
        engine = self._service.engine
        return json_response(
            ModelInfo(
                model_path=engine.config.model,
                tokenizer_path=engine.config.tokenizer or engine.config.model,
                preferred_sampling_params=engine.generation_defaults,
                weight_version=await self._service.server_api.weight_version(),
                has_image_understanding=engine.reads_images,
                has_audio_understanding=engine.reads_audio,
                max_model_len=engine.max_model_len,
                vocab_size=engine.vocab_size,
            )
        )

    async def health_generate(self) -> quart.Response:
        """Handle ``GET /health_generate``: 200 once something has been computed, else 503."""
        word = await self._generate_one_token()
        return json_response(HealthReply(word), 200 if word == "ok" else 503)

    async def _generate_one_token(self) -> str:
        engine = self._service.engine
        word = await self._service.server_api.health_word()
        if word != "ok":
            return word
        try:
            if engine.task != "generate":
                await engine.pooling.compute_one(timeout=HEALTH_TIMEOUT)
            else:
                await engine.complete(
                    TokensPrompt((0,)),
                    SamplingParams(max_tokens=1, temperature=0.0),
                    request_id=f"health-{self._service.record.request_id}",
                    priority=_BEFORE_ALL,
                    timeout=HEALTH_TIMEOUT,
                )
        except DeadlineExceeded:
            return "timeout"
        except QueueFull:
            return "busy"
        except Draining:
            return "draining"
        except (EngineError, WorkerLost):
            return "no_worker"
        return "ok"

    def _scheduler_load(self, statistics: EngineStatistics) -> SchedulerLoad:
        scheduler = statistics.scheduler
        return SchedulerLoad(
            dp_rank=0,
            num_reqs=scheduler.num_running + scheduler.num_waiting,
            num_waiting_reqs=scheduler.num_waiting,
            num_tokens=scheduler.pages_held * self._service.engine.ready.page_size,
        )

    def _max_total_num_tokens(self) -> int:
        ready = self._service.engine.ready
        return ready.num_pages * ready.page_size


def shown_options(config: ServerConfig) -> dict[str, Any]:
    """Return the values of all options by name, without secret ones and passwords in URLs."""
    return {
        option.name: _without_credentials(getattr(group, option.name))
        for group in (config.engine, config)
        for option in options_of(type(group))
        if not option.secret
    }


def _without_credentials(value: Any) -> Any:
    return _CREDENTIALS.sub("", value) if isinstance(value, str) else value
