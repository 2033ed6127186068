"""Chat templates: conversations rendered as the text that the model was trained with.

Templates are jinja2 with the whitespace rules, functions, tags and variables of transformers. In
the OpenAI API the arguments of tool calls are JSON text; a template gets them in the form that it
prints. Templates come with models, so they run in jinja2's sandbox, with bounded time and memory,
here or in another process. An error in a template fails the request.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import jinja2
import jinja2.meta
import jinja2.nodes

from trioserve.protocol.errors import InvalidRequest, ModelLoadError
from trioserve.text.template_bounds import BeyondBounds, BoundedEnvironment, measure
from trioserve.text.template_sandbox import TemplateEnvironment

MEDIA_TOKENS = {kind: f"{kind}_token" for kind in ("image", "audio", "video")}
"""Variables with the token that stands for a medium in a prompt, by its kind. Models that read no
media of a kind don't have its variable."""
_CONTINUE_HERE = "CONTINUE_THE_FINAL_MESSAGE_HERE "
"""Mark at the end of the message to be continued. Its space shows if the template trims."""


class ConversationFields(Protocol):
    """A conversation to render: a ``ChatPrompt``, or its fields in the child process."""

    @property
    def messages(self) -> Sequence[Any]:
        """Dicts with a role and a content."""

    @property
    def template_arguments(self) -> Mapping[str, Any]:
        """Further variables of the template."""

    @property
    def add_generation_prompt(self) -> bool:
        """True if the text ends with the beginning of an answer."""

    @property
    def continue_final_message(self) -> bool:
        """True if the text ends within the last message."""


class ChatTemplate:
    """A model's chat template.

    Args:
        source: The template's text.
        bos_token: The template's variable of this name; None leaves it undefined, so it prints
            nothing.
        eos_token: Likewise.
        special_tokens: Further variables.

    Raises:
        ModelLoadError: The text isn't a template; the message names the line.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        **special_tokens: str | None,
    ) -> None:
        self.source = source
        try:
            environment = BoundedEnvironment()
            tree = environment.parse(source)
            bounded = environment.printer(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"the chat template is not valid jinja2: line {error.lineno}: {error.message}"
            ) from error
        except (RecursionError, SyntaxError, ValueError, MemoryError) as error:
            # jinja2 compiles it to Python, which has limits of its own.
            reason = f"{type(error).__name__}: {error}"
            raise ModelLoadError(f"the chat template can't be compiled: {reason}") from error
        tokens = {"bos_token": bos_token, "eos_token": eos_token, **special_tokens}
        self.tokens = {name: token for name, token in tokens.items() if token is not None}
        """Special tokens by variable name."""
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        """Names of the variables that the template reads. Arguments of other names change nothing.

        Variables that the template always sets itself aren't among them.
        """
        self.takes_parts = _iterates_over_content(tree)
        """True if the template reads the parts of a content; otherwise it gets one string."""

        self._bounded = _Renderer(bounded, self.tokens, self.takes_parts)

    @functools.cached_property
    def _unbounded(self) -> _Renderer:
        printer = TemplateEnvironment().printer(self.source)
        return _Renderer(printer, self.tokens, self.takes_parts)

    def render(self, prompt: ConversationFields) -> str:
        """Return the text of ``prompt``, special tokens included: encode it without adding any.

        Time and memory aren't bounded, so a server renders in a process of its own.

        Raises:
            InvalidRequest: The messages are malformed, or the template refuses them.
        """
        return self._unbounded.render(prompt)

    def render_within_bounds(self, prompt: ConversationFields) -> str:
        """Return the text of :meth:`render`, within microseconds or a few milliseconds.

        Raises:
            BeyondBounds: It may take longer.
            InvalidRequest: As for :meth:`render`.
        """
        measure({"messages": prompt.messages, **prompt.template_arguments})
        return self._bounded.render(prompt)


@attrs.define(eq=False)
class _Renderer:
    """A compiled template in one of the environments."""

    _print: Callable[[dict[str, Any]], str]
    """Function that renders the template with variables."""
    _tokens: Mapping[str, str]
    _takes_parts: bool
    _media_tokens: Mapping[str, str] = attrs.field(init=False)
    """Tokens that stand for media, by their kinds."""
    _arguments_as_text: bool | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._media_tokens = {
            kind: self._tokens[name] for kind, name in MEDIA_TOKENS.items() if name in self._tokens
        }

    def render(self, prompt: ConversationFields) -> str:
        """See :meth:`ChatTemplate.render`."""
        messages = [self._message(message) for message in prompt.messages]
        if not messages:
            raise _refuse("messages must have at least one message")
        generation = prompt.add_generation_prompt
        if not prompt.continue_final_message:
            return self._rendered(messages, generation, prompt.template_arguments)
        if generation:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt to be false",
                param="continue_final_message",
            )
        final = _mark_end(messages)
        return _cut_at_mark(self._rendered(messages, False, prompt.template_arguments), final)

    def _rendered(
        self, messages: list[dict[str, Any]], generation: bool, arguments: Mapping[str, Any]
    ) -> str:
        variables = {
            "tools": None,
            "documents": None,
            **self._tokens,
            **arguments,
            "messages": messages,
            "add_generation_prompt": generation,
        }
        try:
            return self._print(variables)
        except (BeyondBounds, MemoryError):
            raise
        except jinja2.TemplateError as error:
            raise _refuse(f"the chat template can't print the messages: {error.message}") from error
        except Exception as error:
            # A template is a program over the client's data: a missing field or a wrong type raises
            # any exception of Python.
            reason = f"{type(error).__name__}: {error}"
            raise _refuse(f"the chat template can't print the messages: {reason}") from error

    def _message(self, message: Any) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _refuse("every message must be an object with a role that is a string")
        content = message.get("content")
        if content is None:
            content = ""
        if isinstance(content, (list, tuple)):
            shown = [_shown_part(part, self._media_tokens) for part in content]
            content = (
                [part for part, _ in shown]
                if self._takes_parts
                else "\n".join(text for _, text in shown)
            )
        elif not isinstance(content, str):
            raise _refuse("a message's content must be a string or a list of text parts")
        printed = {**message, "content": content}
        calls = printed.get("tool_calls")
        if calls:
            printed["tool_calls"] = [self._tool_call(call) for call in _items(calls)]
        else:
            # Templates test for the key, and clients also send it empty.
            printed.pop("tool_calls", None)
        return printed

    def _tool_call(self, call: Any) -> Any:
        """Return a tool call with its arguments in the form that the template prints."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        arguments = function.get("arguments")
        if self._prints_arguments_as_text():
            if isinstance(arguments, Mapping):
                arguments = json.dumps(arguments, ensure_ascii=False)
        elif arguments is None or isinstance(arguments, str):
            arguments = _object_of(arguments or "")
        return {**call, "function": {**function, "arguments": arguments}}

    def _prints_arguments_as_text(self) -> bool:
        """Return True if the template prints a call's arguments unchanged, so they must be text.

        Clients send JSON text. Most templates take a dict, and print it as JSON or argument by
        argument. A trial tells them apart: given a dict, a template for texts fails or prints
        Python's form.
        """
        if self._arguments_as_text is None:
            as_object, as_text = (
                self._tried(arguments) for arguments in ({"probe": "x"}, '{"probe": "x"}')
            )
            self._arguments_as_text = '{"probe": "x"}' in as_text and (
                "probe" not in as_object or "'probe'" in as_object
            )
        return self._arguments_as_text

    def _tried(self, arguments: Any) -> str:
        call = {"name": "f", "arguments": arguments}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "x"},
        ]
        try:
            return self._rendered(messages, True, {})
        except InvalidRequest:
            return ""


def _refuse(reason: str) -> InvalidRequest:
    return InvalidRequest(reason, param="messages")


def _items(calls: Any) -> Sequence[Any]:
    if not isinstance(calls, (list, tuple)):
        raise _refuse("a message's tool_calls must be a list")
    return calls


def _object_of(arguments: str) -> Any:
    """Return the object in the JSON text ``arguments``; the text itself if it isn't an object."""
    if not arguments.strip():
        return {}  # Some clients write a call without arguments like this.
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _shown_part(part: Any, media_tokens: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Return the form of a part for templates that read parts, and its text for all others."""
    if isinstance(part, str):
        return {"type": "text", "text": part}, part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in media_tokens:
        # Templates look for a type, or for a field of that name.
        return {"type": kind, kind: media_tokens[kind]}, media_tokens[kind]
    if kind != "text":
        raise _refuse(f"this model reads text only; a content part has the type {kind!r}")
    text = part.get("text")
    if not isinstance(text, str):
        raise _refuse("a text part must have a text that is a string")
    return {"type": "text", "text": text}, text


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Append the mark to the final message's text, in place; return that text without it."""
    content = messages[-1]["content"]
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUE_HERE
        return content
    if not content:
        raise _refuse("continue_final_message is set, and the final message has no text")
    text: str = content[-1]["text"]
    content[-1]["text"] = text + _CONTINUE_HERE
    return text


def _cut_at_mark(rendered: str, final: str) -> str:
    mark = _CONTINUE_HERE.strip()
    position = rendered.rfind(mark)
    if position < 0 or final.strip() not in rendered:
        raise _refuse(
            "continue_final_message is set, and the chat template doesn't print the final message"
        )
    before = rendered[:position]
    if rendered.startswith(_CONTINUE_HERE, position):
        return before
    return before.rstrip()  # The template trims messages, but couldn't trim before the mark.


def _iterates_over_content(tree: jinja2.nodes.Template) -> bool:
    """Return True if a ``for`` loop of the template iterates over a message's content.

    The loop's subject is ``message['content']`` or ``message.content`` of any variable, or a
    variable set to one of these, with any filters.
    """
    names = {
        assign.target.name
        for assign in tree.find_all(jinja2.nodes.Assign)
        if isinstance(assign.target, jinja2.nodes.Name) and _is_content(assign.node, set())
    }
    return any(_is_content(loop.iter, names) for loop in tree.find_all(jinja2.nodes.For))


def _is_content(node: jinja2.nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, jinja2.nodes.Filter):
        node = node.node
    if isinstance(node, jinja2.nodes.Name):
        return node.name in names
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Getattr) and node.attr == "content"
