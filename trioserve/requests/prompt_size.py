"""How large a prompt is, in characters, before anybody renders or encodes it. Never raises."""

from __future__ import annotations

from trioserve.requests.request import ChatPrompt, Prompt, TextPrompt, TokensPrompt

_MESSAGE_CHARACTERS = 20
"""What a message weighs besides its own texts: the role and the template's markers."""


def characters_of(prompt: Prompt) -> int:
    """About how many characters there are to render and encode: all texts of a chat, tools too."""
    if isinstance(prompt, TokensPrompt):
        return 0
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    total = _MESSAGE_CHARACTERS * len(prompt.messages)
    left: list[object] = [*prompt.messages, prompt.template_arguments]
    while left:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            left += item.keys()
            left += item.values()
        elif isinstance(item, (list, tuple)):
            left += item
        else:
            total += 1
    return total


def characters_of_contents(prompt: Prompt) -> int:
    """About how many characters will be encoded at least: of a chat, what its messages say.

    A template may leave out tools and other arguments.
    """
    if isinstance(prompt, TokensPrompt):
        return 0
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    return sum(_content_characters(message) for message in prompt.messages)


def characters_of_roles(prompt: ChatPrompt) -> int:
    """The characters of all messages' roles, which may be any strings."""
    roles = [message.get("role") for message in prompt.messages if isinstance(message, dict)]
    return sum(len(role) for role in roles if isinstance(role, str))


def _content_characters(message: object) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return _MESSAGE_CHARACTERS + len(content)
    if isinstance(content, (list, tuple)):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return _MESSAGE_CHARACTERS + sum(len(text) for text in texts if isinstance(text, str))
    return _MESSAGE_CHARACTERS
