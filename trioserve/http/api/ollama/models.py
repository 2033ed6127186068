"""Handlers of Ollama's questions about the server: its models and its version."""

from __future__ import annotations

from datetime import UTC, datetime

import quart

from trioserve.http.api.ollama.fields import served_name
from trioserve.http.api.ollama.model_schemas import (
    OllamaDetails,
    OllamaModel,
    OllamaModels,
    OllamaRunningModel,
    OllamaRunningModels,
    OllamaVersion,
    ShowRequest,
    ShowResponse,
)
from trioserve.http.api.openai.chat.format import ChatFormat
from trioserve.http.api.service import CURLS_TYPE, Service, json_response
from trioserve.protocol.version import __version__


class OllamaModelEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service, format: ChatFormat) -> None:
        self._service = service
        self._format = format
        self._started = datetime.fromtimestamp(service.started, UTC).isoformat()

    async def ollama_tags(self) -> quart.Response:
        """Handle ``GET /api/tags``."""
        return json_response(
            OllamaModels(
                [
                    OllamaModel(
                        name=name,
                        model=name,
                        modified_at=self._started,
                        digest=self._digest,
                        details=self._details(name),
                    )
                    for name in self._names()
                ]
            )
        )

    async def ollama_ps(self) -> quart.Response:
        """Handle ``GET /api/ps``."""
        return json_response(
            OllamaRunningModels(
                [
                    OllamaRunningModel(
                        name=name,
                        model=name,
                        digest=self._digest,
                        details=self._details(name),
                        context_length=self._service.engine.max_model_len,
                    )
                    for name in self._names()
                ]
            )
        )

    async def ollama_show(self) -> quart.Response:
        """Handle ``POST /api/show``."""
        service, engine = self._service, self._service.engine
        request = await service.read(ShowRequest, CURLS_TYPE)
        name = served_name(request.model or request.name, service)
        template = engine.tokenizer.chat_template
        return json_response(
            ShowResponse(
                parameters="\n".join(
                    f"{field} {value}" for field, value in engine.generation_defaults.items()
                ),
                template="" if template is None else template.source,
                details=self._details(name),
                model_info={
                    "general.architecture": "trioserve",
                    "general.basename": engine.model_name,
                    "trioserve.context_length": engine.max_model_len,
                    "trioserve.vocab_size": engine.vocab_size,
                },
                capabilities=self._capabilities(),
                modified_at=self._started,
            )
        )

    async def ollama_version(self) -> quart.Response:
        """Handle ``GET /api/version``."""
        return json_response(OllamaVersion(__version__))

    def _names(self) -> list[str]:
        service = self._service
        return [*service.model_names, *(adapter.name for adapter in service.engine.adapters)]

    @property
    def _digest(self) -> str:
        return self._service.engine.ready.model_checksum

    def _details(self, name: str) -> OllamaDetails:
        engine, own_names = self._service.engine, self._service.model_names
        return OllamaDetails(
            parent_model="" if name in own_names else own_names[0],
            format="gguf" if engine.config.model.endswith(".gguf") else "safetensors",
            quantization_level=engine.ready.dtype,
        )

    def _capabilities(self) -> list[str]:
        engine = self._service.engine
        if engine.task != "generate":
            return [] if engine.task == "transcribe" else ["embedding"]
        found = {
            "vision": engine.reads_images,
            "tools": self._format.family is not None,
            "thinking": self._format.reasons,
        }
        return ["completion", *(name for name, has in found.items() if has)]
