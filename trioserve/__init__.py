"""trioserve: a server for large language models, built on trio's structured concurrency.

The public names are loaded when they are first used (PEP 562), so that a worker process, which
imports ``trioserve.protocol``, never loads trio.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from trioserve._util.moved_modules import MovedModules
from trioserve.protocol.version import __version__

if TYPE_CHECKING:
    from trioserve.config import EngineConfig, ServerConfig
    from trioserve.engine.engine import Engine
    from trioserve.engine.nursery import open_engine
    from trioserve.engine.offline.async_llm import AsyncLLM
    from trioserve.engine.offline.llm import LLM
    from trioserve.engine.sessions.continuation import Continuation
    from trioserve.engine.sessions.session import Session
    from trioserve.front_ends.serving import serve
    from trioserve.pooling.results import Classifications, Embeddings, LabelScores, Scores
    from trioserve.protocol.errors import (
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
    from trioserve.protocol.grammar import Grammar
    from trioserve.protocol.sampling import SamplingParams
    from trioserve.requests.embedded import EmbeddingsPrompt
    from trioserve.requests.generation import Completion, GenerationStream, Output, Usage
    from trioserve.requests.logprobs import PromptLogprobs
    from trioserve.requests.media.parts import AudioPart, ImagePart, VideoPart
    from trioserve.requests.prompts import ChatPrompt, TextPrompt, TokensPrompt
    from trioserve.requests.retention import Retention, RetentionRange
    from trioserve.requests.speech.transcript import Segment, Transcript, Word
    from trioserve.requests.stream import Chunk, TokenLogprob

_HOME = {
    "EngineConfig": "config",
    "ServerConfig": "config",
    "Engine": "engine.engine",
    "open_engine": "engine.nursery",
    "AsyncLLM": "engine.offline.async_llm",
    "LLM": "engine.offline.llm",
    "Continuation": "engine.sessions.continuation",
    "Session": "engine.sessions.session",
    "serve": "front_ends.serving",
    "Classifications": "pooling.results",
    "Embeddings": "pooling.results",
    "LabelScores": "pooling.results",
    "Scores": "pooling.results",
    "AdapterNotFound": "protocol.errors",
    "ContextTooLong": "protocol.errors",
    "DeadlineExceeded": "protocol.errors",
    "Draining": "protocol.errors",
    "EngineError": "protocol.errors",
    "InvalidRequest": "protocol.errors",
    "ModelLoadError": "protocol.errors",
    "Paused": "protocol.errors",
    "QueueFull": "protocol.errors",
    "RequestAborted": "protocol.errors",
    "SessionLimit": "protocol.errors",
    "ShuttingDown": "protocol.errors",
    "SlowReader": "protocol.errors",
    "TrioserveError": "protocol.errors",
    "Grammar": "protocol.grammar",
    "SamplingParams": "protocol.sampling",
    "Completion": "requests.generation",
    "GenerationStream": "requests.generation",
    "Output": "requests.generation",
    "Usage": "requests.generation",
    "EmbeddingsPrompt": "requests.embedded",
    "PromptLogprobs": "requests.logprobs",
    "AudioPart": "requests.media.parts",
    "ImagePart": "requests.media.parts",
    "VideoPart": "requests.media.parts",
    "ChatPrompt": "requests.prompts",
    "TextPrompt": "requests.prompts",
    "TokensPrompt": "requests.prompts",
    "Retention": "requests.retention",
    "RetentionRange": "requests.retention",
    "Segment": "requests.speech.transcript",
    "Transcript": "requests.speech.transcript",
    "Word": "requests.speech.transcript",
    "Chunk": "requests.stream",
    "TokenLogprob": "requests.stream",
}

__all__ = [
    "LLM",
    "AdapterNotFound",
    "AsyncLLM",
    "AudioPart",
    "ChatPrompt",
    "Chunk",
    "Classifications",
    "Completion",
    "ContextTooLong",
    "Continuation",
    "DeadlineExceeded",
    "Draining",
    "Embeddings",
    "EmbeddingsPrompt",
    "Engine",
    "EngineConfig",
    "EngineError",
    "GenerationStream",
    "Grammar",
    "ImagePart",
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
    "Segment",
    "ServerConfig",
    "Session",
    "SessionLimit",
    "ShuttingDown",
    "SlowReader",
    "TextPrompt",
    "TokenLogprob",
    "TokensPrompt",
    "Transcript",
    "TrioserveError",
    "Usage",
    "VideoPart",
    "Word",
    "__version__",
    "open_engine",
    "serve",
]


sys.meta_path.insert(
    0,
    MovedModules({
        "trioserve.errors": "trioserve.protocol.errors",
        "trioserve.feed": "trioserve._util.feed",
        "trioserve.grammar": "trioserve.protocol.grammar",
        "trioserve.live": "trioserve.observability.live",
        "trioserve.logits_processors": "trioserve.protocol.logits_processors",
        "trioserve.offline": "trioserve.engine.offline",
        "trioserve.sampling": "trioserve.protocol.sampling",
        "trioserve.simulation": "trioserve.testing.fake_engine",
        "trioserve.token_ids": "trioserve.protocol.token_ids",
        "trioserve.wire": "trioserve.protocol.wire",
    }),
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trioserve' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"trioserve.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
