"""The lines that ``trioserve serve`` prints at a terminal when the server listens."""

from __future__ import annotations

from pathlib import Path

from trioserve.config import ServerConfig
from trioserve.model_files import task_of

_REQUESTS = {
    "generate": (
        "/v1/chat/completions",
        '{"messages": [{"role": "user", "content": "Name three colors."}], "max_tokens": 50}',
    ),
    "embed": ("/v1/embeddings", '{"input": "Name three colors."}'),
    "classify": ("/classify", '{"input": "Name three colors."}'),
}
"""Path and JSON of a first request, by the model's task."""
_SPEECH = ("/v1/audio/transcriptions", "-F file=@speech.wav")
"""Path and form of a first request of a model that transcribes."""


def welcome(config: ServerConfig, url: str) -> list[str]:
    """Return lines with the console's URL and a first request for the server at ``url``.

    There are none for a server at a Unix socket.
    """
    if not url.startswith("http"):
        return []
    lines = [f"Console: {url}/console"] if config.console else []
    model = Path(config.engine.model).expanduser()
    task = task_of(model) if model.exists() else "generate"
    path, content = _SPEECH
    if task != "transcribe":
        path, body = _REQUESTS[task]
        content = f"-H 'Content-Type: application/json' -d '{body}'"
    key = " -H 'Authorization: Bearer KEY'" if config.api_key else ""
    return [
        *lines,
        f"Try: curl {url}{path}{key} {content}",
        "Ctrl-C stops it.",
    ]
