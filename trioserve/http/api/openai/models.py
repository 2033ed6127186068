"""Handlers of ``/v1/models``: the names that are served."""

from __future__ import annotations

import quart

from trioserve.http.api.openai.schemas import ModelCard, ModelList
from trioserve.http.api.service import Service, json_response


class ModelEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self) -> quart.Response:
        """Handle ``GET /v1/models``."""
        names = (*self._service.model_names, *self._adapter_paths())
        return json_response(ModelList([self._card(name) for name in names]))

    async def model(self, name: str) -> quart.Response:
        """Handle ``GET /v1/models/{name}``."""
        return json_response(self._card(self._service.model(name)))

    def _adapter_paths(self) -> dict[str, str]:
        return {adapter.name: adapter.path for adapter in self._service.engine.adapters}

    def _card(self, name: str) -> ModelCard:
        own_names = self._service.model_names
        own = name in own_names
        return ModelCard(
            id=name,
            created=self._service.started,
            root=self._service.engine.model_name if own else self._adapter_paths()[name],
            parent=None if own else own_names[0],
            max_model_len=self._service.engine.max_model_len,
        )
