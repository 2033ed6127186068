"""Descriptions of the served models for Ollama's clients, as classes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from trioserve.http.api.schema.reading import Exclusive, about, hint, only
from trioserve.http.api.schema.refused_fields import Refusal


class OllamaDetails(msgspec.Struct, kw_only=True):
    """Kind of a model, as far as the server knows it."""

    parent_model: Annotated[str, about("The base model of an adapter; else empty.")]
    format: Annotated[str, about("`gguf` or `safetensors`.")]
    family: Annotated[str, about("Always empty.")] = ""
    families: Annotated[
        list[str], about("Always empty: no word of Ollama's describes images.")
    ] = []
    parameter_size: Annotated[str, about("Always empty.")] = ""
    quantization_level: Annotated[str, about("The number format of weights and activations.")]


class OllamaModel(msgspec.Struct, kw_only=True):
    """A model that is served."""

    name: Annotated[str, about("The name.")]
    model: Annotated[str, about("The same name.")]
    modified_at: Annotated[str, about("When the server began, in ISO 8601.")]
    size: Annotated[int, about("Always 0.")] = 0
    digest: Annotated[str, about("A checksum of the model's files.")]
    details: Annotated[OllamaDetails, about("The kind of model.")]


class OllamaModels(msgspec.Struct):
    """The models that are served."""

    models: Annotated[list[OllamaModel], about("One for each name.")]


class OllamaRunningModel(msgspec.Struct, kw_only=True):
    """A model that is loaded, as all are."""

    name: Annotated[str, about("The name.")]
    model: Annotated[str, about("The same name.")]
    size: Annotated[int, about("Always 0.")] = 0
    digest: Annotated[str, about("A checksum of the model's files.")]
    details: Annotated[OllamaDetails, about("The kind of model.")]
    expires_at: Annotated[str, about("The end of time: no model is unloaded.")] = (
        "9999-12-31T23:59:59Z"
    )
    size_vram: Annotated[int, about("Always 0.")] = 0
    context_length: Annotated[int, about("Most tokens of prompt and output together.")]


class OllamaRunningModels(msgspec.Struct):
    """The models that are loaded, which are all served ones."""

    models: Annotated[list[OllamaRunningModel], about("One for each name.")]


class OllamaVersion(msgspec.Struct):
    """The server's version."""

    version: Annotated[str, about("The version of trioserve.")]


class ShowRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /api/show``."""

    EXCLUSIVE: ClassVar = (Exclusive(("model", "name")),)

    model: Annotated[
        str | None, about("A name out of `/api/tags`; the first of them by default.")
    ] = None
    name: Annotated[str | None, about("The older name of `model`.")] = None
    verbose: Annotated[Any, hint()] = None
    system: Annotated[Any, only("", refusal=Refusal.CHANGED_MODELS)] = None
    template: Annotated[Any, only("", refusal=Refusal.CHANGED_MODELS)] = None
    options: Annotated[Any, only({}, refusal=Refusal.CHANGED_MODELS)] = None


class ShowResponse(msgspec.Struct, kw_only=True):
    """Description of a model."""

    modelfile: Annotated[str, about("Always empty: there is none.")] = ""
    parameters: Annotated[str, about("The model's default sampling parameters, one on each line.")]
    template: Annotated[str, about("The chat template, in jinja2; empty if there is none.")]
    details: Annotated[OllamaDetails, about("The kind of model.")]
    model_info: Annotated[
        dict[str, Any],
        about("Its name, context length and vocabulary, as `general.…` and `trioserve.…`."),
    ]
    capabilities: Annotated[
        list[str],
        about("`completion`, and `vision`, `tools` and `thinking`; `embedding` for an encoder."),
    ]
    modified_at: Annotated[str, about("When the server began, in ISO 8601.")]
