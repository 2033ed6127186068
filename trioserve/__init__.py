"""trioserve: a server for large language models, built on trio's structured concurrency.

The public names are loaded when they are first used (PEP 562), so that a worker process, which
imports ``trioserve.wire``, never loads trio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trioserve.config import EngineConfig, ServerConfig
    from trioserve.continuation import Continuation
    from trioserve.engine import Engine
    from trioserve.errors import (
        AdapterNotFound,
        ContextTooLong,
        DeadlineExceeded,
        Draining,
        EngineError,
        InvalidRequest,
        ModelLoadError,
        Paused,
        QueueFull,
        RequestAborted,
        SessionLimit,
        ShuttingDown,
        SlowReader,
        TrioserveError,
    )
    from trioserve.generation import Completion, GenerationStream, Output, Usage
    from trioserve.grammar import Grammar
    from trioserve.logprobs import PromptLogprobs
    from trioserve.nursery import open_engine
    from trioserve.offline.async_llm import AsyncLLM
    from trioserve.offline.llm import LLM
    from trioserve.pooling.results import Classifications, Embeddings, LabelScores, Scores
    from trioserve.request import ChatPrompt, TextPrompt, TokensPrompt
    from trioserve.retention import Retention, RetentionRange
    from trioserve.sampling import SamplingParams
    from trioserve.serving import serve
    from trioserve.sessions import Session
    from trioserve.stream import Chunk, TokenLogprob

__version__ = "0.1.0"

_HOME = {
    "EngineConfig": "config",
    "ServerConfig": "config",
    "Completion": "generation",
    "Engine": "engine",
    "GenerationStream": "generation",
    "Grammar": "grammar",
    "Output": "generation",
    "PromptLogprobs": "logprobs",
    "open_engine": "nursery",
    "ContextTooLong": "errors",
    "DeadlineExceeded": "errors",
    "Draining": "errors",
    "AdapterNotFound": "errors",
    "EngineError": "errors",
    "InvalidRequest": "errors",
    "ModelLoadError": "errors",
    "Paused": "errors",
    "QueueFull": "errors",
    "RequestAborted": "errors",
    "SessionLimit": "errors",
    "ShuttingDown": "errors",
    "SlowReader": "errors",
    "TrioserveError": "errors",
    "AsyncLLM": "offline.async_llm",
    "LLM": "offline.llm",
    "Classifications": "pooling.results",
    "Embeddings": "pooling.results",
    "LabelScores": "pooling.results",
    "Scores": "pooling.results",
    "ChatPrompt": "request",
    "TextPrompt": "request",
    "TokensPrompt": "request",
    "Retention": "retention",
    "RetentionRange": "retention",
    "SamplingParams": "sampling",
    "serve": "serving",
    "Continuation": "continuation",
    "Session": "sessions",
    "Chunk": "stream",
    "TokenLogprob": "stream",
    "Usage": "generation",
}

__all__ = [
    "LLM",
    "AdapterNotFound",
    "AsyncLLM",
    "ChatPrompt",
    "Chunk",
    "Classifications",
    "Completion",
    "ContextTooLong",
    "Continuation",
    "DeadlineExceeded",
    "Draining",
    "Embeddings",
    "Engine",
    "EngineConfig",
    "EngineError",
    "GenerationStream",
    "Grammar",
    "InvalidRequest",
    "LabelScores",
    "ModelLoadError",
    "Output",
    "Paused",
    "PromptLogprobs",
    "QueueFull",
    "RequestAborted",
    "Retention",
    "RetentionRange",
    "SamplingParams",
    "Scores",
    "ServerConfig",
    "Session",
    "SessionLimit",
    "ShuttingDown",
    "SlowReader",
    "TextPrompt",
    "TokenLogprob",
    "TokensPrompt",
    "TrioserveError",
    "Usage",
    "__version__",
    "open_engine",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trioserve' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"trioserve.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
