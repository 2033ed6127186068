"""The size of a prompt in characters, before it is rendered or encoded. Never raises."""

from __future__ import annotations

from trioserve.requests.embedded import EmbeddingsPrompt, SpeechPrompt
from trioserve.requests.prompts import ChatPrompt, Prompt, TextPrompt, TokensPrompt

_HASHED_BYTES = 200
"""Bytes that are hashed in the time in which a character is encoded, 0.2 µs."""
_MESSAGE_CHARACTERS = 20
"""Characters of a message besides its own texts: the role and the template's markers."""


def characters_of(prompt: Prompt) -> int:
    """Return about how many characters are rendered and encoded, a chat's tools included.

    Embeddings, which are hashed, count as characters that take as long.
    """
    if isinstance(prompt, TokensPrompt | SpeechPrompt):
        return 0
    if isinstance(prompt, EmbeddingsPrompt):
        return prompt.embeddings.nbytes // _HASHED_BYTES
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    hashed = sum(each.embeddings.nbytes for each in prompt.others.embedded) // _HASHED_BYTES
    total = hashed + _MESSAGE_CHARACTERS * len(prompt.messages)
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
    """Return about the least number of characters to encode: those of a chat's messages.

    A template may leave out tools and other arguments.
    """
    if isinstance(prompt, TokensPrompt | EmbeddingsPrompt | SpeechPrompt):
        return 0
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    return sum(_content_characters(message) for message in prompt.messages)


def characters_of_roles(prompt: ChatPrompt) -> int:
    """Return the characters of all messages' roles, which may be any strings."""
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
