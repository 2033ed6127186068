"""Reading of answers: reasoning, text and tool calls are told apart, streamed or whole."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

from trioserve.http.api.openai.chat.format import ChatFormat
from trioserve.http.api.openai.chat.schemas import (
    AssistantMessage,
    Delta,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from trioserve.requests.prompts import ChatPrompt
from trioserve.text.reasoning import CLOSE, OPEN, ReasoningSplitter, is_open
from trioserve.text.tool_parsers import (
    ArgumentsDelta,
    TextPiece,
    ToolCallStart,
    ToolParser,
    ToolUse,
)

_TAIL_TOKENS = 32
"""Upper bound of the tokens of an opening mark at the end of a prompt."""


def opens_reasoning(end_of_prompt: str, prompt: ChatPrompt) -> bool:
    """Return whether the prompt itself has begun the reasoning, so that the output goes on with it.

    Args:
        end_of_prompt: the last characters of the prompt as it was rendered.
    """
    if end_of_prompt.rstrip().endswith(OPEN):
        return True
    content = prompt.messages[-1].get("content") if prompt.continue_final_message else None
    return isinstance(content, str) and is_open(content)


@attrs.frozen(kw_only=True)
class ReaderOptions:
    """Parts to tell apart in the answers to one request."""

    format: ChatFormat
    prompt: ChatPrompt
    use: ToolUse | None = None
    separate_reasoning: bool = True
    include_reasoning: bool = True
    functions: bool = False
    """True if a call is returned as ``function_call``."""
    hidden: re.Pattern[str] | None = None
    """Special tokens to remove from the text; they are kept at first, to see the marks among them.
    """

    def reader(self, prompt_ids: Sequence[int]) -> AnswerReader:
        """Return a reader of one answer to the prompt with these ids."""
        splitter = parser = None
        if self.format.reasons and self.separate_reasoning:
            tail = self.format.tokenizer.decode(
                prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False
            )
            splitter = ReasoningSplitter(opens_reasoning(tail, self.prompt))
        if self.use is not None and self.format.family is not None:
            parser = self.format.family.parser.of(self.use.tools, free=self.use.is_free)
        return AnswerReader(
            splitter,
            parser,
            self.include_reasoning,
            self.hidden,
            self.functions,
            calls_only=self.use is not None and self.use.required,
            close_id=self.format.tokenizer.token_of(CLOSE),
        )


def hidden_tokens(format: ChatFormat, *, with_tools: bool) -> re.Pattern[str] | None:
    """Return a pattern of special tokens that aren't marks; None if marks are visible anyway."""
    if not format.hides_marks(with_tools=with_tools):
        return None
    texts = {format.tokenizer.token_text(id) for id in format.tokenizer.special_ids}
    marks = format.marks(with_tools=with_tools)
    hidden = sorted(texts.difference(marks, [""]), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, hidden))) if hidden else None


@attrs.define(eq=False)
class AnswerReader:
    """Reader of one answer. If there is nothing to tell apart, all of it is content."""

    _splitter: ReasoningSplitter | None = None
    _parser: ToolParser | None = None
    _include_reasoning: bool = True
    _hidden: re.Pattern[str] | None = None
    _functions: bool = False
    _calls_only: bool = attrs.field(default=False, kw_only=True)
    """True if a grammar made the answer calls: text left at its end is a part of one."""
    _close_id: int | None = attrs.field(default=None, kw_only=True)
    """Id of the token that ends reasoning, if it is a single token."""
    has_calls: bool = False
    """True once there was a tool call."""
    num_reasoning_tokens: int = attrs.field(default=0, init=False)
    """Tokens of reasoning so far, with its marks."""
    _num_tokens: int = attrs.field(default=0, init=False)
    """Tokens up to the end of reasoning."""
    _is_counted: bool = attrs.field(default=False, init=False)
    """True once reasoning has ended, and its tokens with it."""

    @property
    def plain(self) -> bool:
        """True if all of an answer is content, which is returned as it comes."""
        return self._splitter is None and self._parser is None and self._hidden is None

    @property
    def is_reasoning(self) -> bool:
        """True if the next token is expected to be reasoning."""
        return self._splitter is not None and self._splitter.inside

    @property
    def reasoning_tokens(self) -> int | None:
        """Return the tokens of reasoning so far; None if they can't be counted.

        They can't be counted if reasoning isn't told apart, or its end isn't a token.
        """
        if self._splitter is None or self._close_id is None:
            return None
        return self.num_reasoning_tokens

    @property
    def num_left_out(self) -> int:
        """Return the tokens of reasoning that the answer leaves out, if they can be counted."""
        return 0 if self._include_reasoning else self.reasoning_tokens or 0

    @property
    def call_reason(self) -> str:
        """Return the finish reason of an answer that has a tool call."""
        return "function_call" if self._functions else "tool_calls"

    def feed(self, text: str, *, last: bool = False, token_ids: Sequence[int] = ()) -> Delta:
        """Return the additions of the next piece of the answer; the ``last`` one adds held-back
        text.

        Args:
            token_ids: the piece as tokens, which are counted.
        """
        if self._hidden is not None:
            text = self._hidden.sub("", text)
        reasoning = ""
        if self._splitter is not None:
            split = self._splitter.feed(text)
            reasoning, text = split.reasoning, split.answer
            if last:
                split = self._splitter.finish()
                reasoning, text = reasoning + split.reasoning, text + split.answer
            self._count(self._splitter, token_ids)
        delta = Delta()
        if self._parser is None:
            delta.content = text or None
        else:
            self._parse(self._parser, text, last, delta)
        if reasoning and self._include_reasoning:
            delta.reasoning = delta.reasoning_content = reasoning
        if self._functions and delta.tool_calls:
            # The grammar has seen to it that there is one.
            delta.function_call, delta.tool_calls = delta.tool_calls[0].function, None
        return delta

    def message(
        self, text: str, *, token_ids: Sequence[int] = (), role: str = "assistant"
    ) -> AssistantMessage:
        """Return the message of an answer with the text ``text``."""
        delta = self.feed(text, last=True, token_ids=token_ids)
        message = AssistantMessage(role=role, content=delta.content)
        if delta.reasoning is not None:
            message.reasoning = message.reasoning_content = delta.reasoning
        if delta.tool_calls:
            message.tool_calls = [
                ToolCall(call.id, FunctionCall(call.function.name, call.function.arguments or ""))
                for call in delta.tool_calls
                if call.id is not None and call.function.name is not None
            ]
        elif delta.function_call is not None:
            call = delta.function_call
            message.function_call = FunctionCall(call.name or "", call.arguments or "")
        elif message.content is None and delta.reasoning is None:
            message.content = ""
        return message

    def _count(self, splitter: ReasoningSplitter, token_ids: Sequence[int]) -> None:
        if self._is_counted:
            return
        before = self._num_tokens
        self._num_tokens += len(token_ids)
        if splitter.inside:
            # Tokens before the opening mark are among them.
            self.num_reasoning_tokens = self._num_tokens
        elif splitter.opened:
            self._is_counted = True
            own = len(token_ids)
            if self._close_id is not None and self._close_id in token_ids:
                own = token_ids.index(self._close_id) + 1
            self.num_reasoning_tokens = before + own

    def _parse(self, parser: ToolParser, text: str, last: bool, delta: Delta) -> None:
        """Put the parser's results for ``text`` into ``delta``: one entry for each call."""
        contents: list[str] = []
        calls: dict[int, ToolCallDelta] = {}
        arguments: dict[int, list[str]] = {}
        events = parser.feed(text)
        ends = parser.finish() if last else []
        if self._calls_only:
            ends = [event for event in ends if not isinstance(event, TextPiece)]
        for event in events + ends:
            if isinstance(event, TextPiece):
                contents.append(event.text)
            elif isinstance(event, ToolCallStart):
                function = FunctionDelta(event.name, "")
                calls[event.index] = ToolCallDelta(event.index, function, event.id, "function")
                self.has_calls = True
            else:
                assert isinstance(event, ArgumentsDelta)
                calls.setdefault(event.index, ToolCallDelta(event.index, FunctionDelta()))
                arguments.setdefault(event.index, []).append(event.text)
        for index, pieces in arguments.items():
            calls[index].function.arguments = "".join(pieces)
        delta.content = "".join(contents) or None
        delta.tool_calls = list(calls.values()) or None
