"""The directive ``clients-table``: the clients that are tested, in pinned versions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parent.parent.parent
OWN = "constraints.txt"
PYTHON = "tests/clients/requirements.txt"
NODE = "tests/clients/node/package.json"
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
"""Package, where it runs, the file that pins it, and what it speaks."""


def version_of(package: str, file: str) -> str:
    """The version of ``package`` that ``file`` pins.

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
    """A Markdown table with a row for every client."""
    yield "| Client | Version | On | Dialects |"
    yield "| --- | --- | --- | --- |"
    for package, place, file, dialects in CLIENTS:
        yield f"| `{package}` | {version_of(package, file)} | {place} | {dialects} |"


class ClientsTable(SphinxDirective):
    """``clients-table``; it has no arguments."""

    def run(self) -> list[nodes.Node]:
        """The nodes of the table."""
        for file in (OWN, PYTHON, NODE):
            self.env.note_dependency(str(ROOT / file))
        return self.parse_text_to_nodes("\n".join(table_lines()))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive with Sphinx."""
    app.add_directive("clients-table", ClientsTable)
    return {"parallel_read_safe": True}
