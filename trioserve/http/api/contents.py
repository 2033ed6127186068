"""Prompts and outputs of a request for the log of ``--log-requests``.

Everything is cut to a bounded length, whatever a client sends and a model answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import msgspec

from trioserve.http.api.jobs import PromptJob
from trioserve.pooling.inputs import Item
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.embedded import EmbeddingsPrompt
from trioserve.requests.prompts import ChatPrompt, Prompt, TextPrompt
from trioserve.requests.stream import Chunk

MAX_CHARACTERS = 2000
"""Characters logged of a prompt, an output or a sampling field."""
MAX_TEXTS = 8
"""Prompts, and outputs, logged of one request."""


@attrs.define(eq=False)
class _Output:
    """The beginning of an output, and its length."""

    text: str = ""
    length: int = 0

    def add(self, text: str) -> None:
        self.text += text[: MAX_CHARACTERS - len(self.text)]
        self.length += len(text)


@attrs.define(eq=False)
class Contents:
    """The prompts, the sampling fields that were set and, as they come, the outputs."""

    _jobs: Sequence[PromptJob]
    _outputs: dict[tuple[int, int], _Output] = attrs.field(factory=dict)

    def add(self, index: int, chunk: Chunk) -> None:
        """Add a piece of an output of prompt ``index``."""
        key = index, chunk.index
        if key in self._outputs or len(self._outputs) < MAX_TEXTS:
            self._outputs.setdefault(key, _Output()).add(chunk.text)

    def fields(self) -> dict[str, object]:
        """Return the fields for the log's line. Lists have an entry for each prompt, or output."""
        outputs = [self._outputs[key] for key in sorted(self._outputs)]
        return {
            "prompts": [_prompt_text(job.prompt) for job in self._jobs[:MAX_TEXTS]],
            "sampling": _changed(self._jobs[0].params) if self._jobs else {},
            "outputs": [_clipped(output.text, output.length) for output in outputs],
        }


def item_texts(items: Sequence[Item]) -> list[str]:
    """Return the log fields of texts that are computed as a whole; of pairs, both texts."""
    texts = ["\n".join(item) if isinstance(item, tuple) else item for item in items[:MAX_TEXTS]]
    return [
        _clipped(text, len(text)) if isinstance(text, str) else _prompt_text(text) for text in texts
    ]


def _clipped(text: str, length: int) -> str:
    if length <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}… ({length} characters)"


def _prompt_text(prompt: Prompt) -> str:
    if isinstance(prompt, TextPrompt):
        return _clipped(prompt.text, len(prompt.text))
    if isinstance(prompt, EmbeddingsPrompt):
        return f"embeddings of the shape {list(prompt.embeddings.shape)}"
    value: object = prompt.messages if isinstance(prompt, ChatPrompt) else prompt.token_ids
    text = msgspec.json.encode(value, enc_hook=str).decode("utf-8", "replace")
    return _clipped(text, len(text))


def _changed(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from their defaults; numbers as they are, all else as text."""
    usual = SamplingParams()
    values = {
        field.name: getattr(params, field.name)
        for field in attrs.fields(SamplingParams)
        if getattr(params, field.name) != getattr(usual, field.name)
    }
    return {
        name: value
        if isinstance(value, (bool, int, float))
        else _clipped(str(value), len(str(value)))
        for name, value in values.items()
    }
