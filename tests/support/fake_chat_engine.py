"""An engine that says what it was asked, word by word. Run as a program, it chats at a terminal.

What is written there is kept in the file that ``$TRIOSERVE_HISTORY`` names.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import attrs
import trio

from trioserve.cli.chat import chat
from trioserve.cli.chat_backends import EngineChatBackend
from trioserve.cli.conversation import ChatConversation
from trioserve.cli.history import History, history_path
from trioserve.cli.terminal import Terminal
from trioserve.protocol.errors import ContextTooLong
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.generation import Usage
from trioserve.requests.prompts import ChatPrompt
from trioserve.requests.stream import Chunk

if TYPE_CHECKING:
    from trioserve.engine.engine import Engine


@attrs.define
class FakeStream:
    """Replies with one chunk a word; a message ``forever`` is answered without end."""

    words: list[str]
    endless: bool
    pause: float
    _position: int = 0
    left: bool = False

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=10, completion_tokens=self._position, cached_tokens=0)

    async def __aenter__(self) -> FakeStream:
        if self.words == ["refuse"]:
            raise ContextTooLong("too long")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.left = True

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Chunk:
        await trio.sleep(self.pause)
        position = self._position
        if not self.words or (position >= len(self.words) and not self.endless):
            raise StopAsyncIteration
        self._position += 1
        word = self.words[position % len(self.words)]
        last = position + 1 == len(self.words) and not self.endless
        return Chunk(
            text=("" if position == 0 else " ") + word,
            token_ids=(position,),
            finish_reason="length" if last and word == "cut" else "stop" if last else None,
        )


@attrs.define
class FakeEngine:
    """Remembers what it was asked; ``generate`` is all it can do."""

    model_name = "echo"
    max_model_len = 2048

    pause: float = 0.0
    prompts: list[Any] = attrs.field(factory=list)
    params: list[SamplingParams] = attrs.field(factory=list)
    streams: list[FakeStream] = attrs.field(factory=list)
    generation_defaults: dict[str, Any] = attrs.field(factory=dict)

    def generate(self, prompt: Any, params: SamplingParams) -> FakeStream:
        self.prompts.append(prompt)
        self.params.append(params)
        asked = prompt.messages[-1]["content"] if isinstance(prompt, ChatPrompt) else prompt
        self.streams.append(FakeStream(asked.split(), asked == "forever", self.pause))
        return self.streams[-1]

    def as_engine(self) -> Engine:
        return cast("Engine", self)


async def main() -> None:
    backend = EngineChatBackend(FakeEngine(pause=0.01).as_engine())
    terminal = Terminal.standard(History(history_path(None, os.environ)))
    await chat(backend, ChatConversation(), terminal=terminal)
    print("left")


if __name__ == "__main__":
    trio.run(main)
