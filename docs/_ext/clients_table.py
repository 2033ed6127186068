"""A table of the clients that are tested, in pinned versions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
OWN = "constraints.txt"
PYTHON = "tests/clients/programs/requirements.txt"
NODE = "tests/clients/programs/node/package.json"
CLIENTS = (
    ("openai", "Python", OWN, "OpenAI's chats, completions and responses"),
    ("anthropic", "Python", OWN, "Anthropic's messages"),
    ("ollama", "Python", OWN, "Ollama's"),
    ("langchain-openai", "Python", PYTHON, "OpenAI's chats, completions, responses and embeddings"),
    ("litellm", "Python", PYTHON, "OpenAI's, vLLM's, Anthropic's and Ollama's"),
    ("instructor", "Python", PYTHON, "OpenAI's chats and responses, for objects of a class"),
    ("openai", "Node.js", NODE, "OpenAI's chats, completions, responses and embeddings"),
    ("@ai-sdk/openai-compatible", "Node.js", NODE, "OpenAI's chats, completions and embeddings"),
    ("ai", "Node.js", NODE, "the AI SDK, through the one above"),
)
"""Each client's package, its platform, the file that pins it, and the APIs that it uses."""


def version_of(package: str, file: str) -> str:
    """Return the version of ``package`` that ``file`` pins.

    Raises:
        LookupError: it pins none.
    """
    text = (ROOT / file).read_text()
    if file.endswith(".json"):
        return str(json.loads(text)["dependencies"][package])
    found = re.search(rf"^{re.escape(package)}==(\S+)", text, re.M)
    if found is None:
        raise LookupError(f"{file} has no {package}")
    return found[1]


def table_lines() -> Iterator[str]:
    """Yield a Markdown table with a row for every client."""
    yield "| Client | Version | On | Dialects |"
    yield "| --- | --- | --- | --- |"
    for package, place, file, dialects in CLIENTS:
        yield f"| `{package}` | {version_of(package, file)} | {place} | {dialects} |"
