"""The conversation of ``trioserve chat``, and the commands that change it. No I/O but /save."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from trioserve.cli.parser import SAMPLING_OPTIONS
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.sampling import SamplingParams

HELP = '''\
Write a message and press Enter. A message of several lines is pasted, or begins and ends with """,
or has a \\ at the end of each line but its last. A line that begins with / is a command:
  /regenerate        answer the last message again
  /clear             clear the conversation (but not /system and /set)
  /system TEXT       set the system message; without TEXT, remove it
  /set NAME VALUE    sampling: temperature, top_p, max_tokens, ...; without VALUE the model's own,
                     and without NAME show what is set
  /save FILE         write the conversation as JSON, which the chat API takes
  /help              show this
  /exit              leave (also Ctrl-D)
Ctrl-C stops a reply. To send a line that begins with /, put a space before it.'''

_OPTIONS = {option.name: option for option in SAMPLING_OPTIONS}


@attrs.define(eq=False, kw_only=True)
class ChatConversation:
    """The messages so far, with a system message and sampling parameters.

    ``fields`` are those of :class:`trioserve.SamplingParams`; the model sets the others.
    """

    system: str | None = None
    fields: Mapping[str, Any] = attrs.field(factory=dict)
    messages: list[dict[str, Any]] = attrs.field(factory=list)
    """Messages and replies, alternating; messages without a reply are left out."""

    def with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return ``messages`` after the system message, if there is one."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *messages]

    def command(self, line: str) -> str:
        """Run the command in ``line``, which begins with a slash, and return its result."""
        name, _, argument = line.strip().partition(" ")
        commands: dict[str, Callable[[str], str]] = {
            "/clear": self._clear,
            "/help": lambda _: HELP,
            "/save": self._save,
            "/set": self._set,
            "/system": self._set_system,
        }
        if name not in commands:
            return f"There is no command {name}; /help lists them."
        return commands[name](argument.strip())

    def _clear(self, _: str) -> str:
        self.messages.clear()
        return "The conversation is cleared."

    def _set_system(self, text: str) -> str:
        self.system = text or None
        return "The system message is set." if text else "The system message is removed."

    def _save(self, name: str) -> str:
        if not name:
            return "/save needs the name of a file."
        path = Path(name).expanduser()
        try:
            with open(path, "x", encoding="utf-8") as file:
                json.dump(self.with_system(self.messages), file, ensure_ascii=False, indent=2)
                file.write("\n")
        except OSError as error:
            return f"{path} can't be written: {error.strerror or error}."
        return f"The conversation is in {path}."

    def _set(self, text: str) -> str:
        name, _, value = text.replace("=", " ", 1).partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        if not name:
            return self._settings()
        if name not in _OPTIONS:
            return f"There is no {name}; there are {', '.join(_OPTIONS)}."
        fields = {field: given for field, given in self.fields.items() if field != name}
        try:
            if value:
                fields[name] = _OPTIONS[name].from_variable(value)
            SamplingParams(**fields)
        except InvalidRequest as error:
            return f"{error}."
        self.fields = fields
        return self._settings()

    def _settings(self) -> str:
        if not self.fields:
            return "Sampling is the model's own."
        return ", ".join(f"{name} {_shown(value)}" for name, value in self.fields.items())


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
