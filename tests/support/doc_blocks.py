"""The code blocks of the README and of docs/, and the commands in them."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import attrs

__all__ = [
    "ROOT",
    "Block",
    "Command",
    "blocks",
    "commands_of",
    "matches",
    "program_on",
    "write_adapters",
]

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)


@attrs.frozen
class Block:
    """A fenced block: ``number`` counts those of its language on its page, from 0."""

    page: str
    """The file's name without its ending."""
    language: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.language}-{self.number}"


@attrs.frozen
class Command:
    """A command line, its lines joined, and what the page shows of its output."""

    line: str
    output: str = ""


def blocks(*languages: str) -> list[Block]:
    """Return all blocks, or those of some languages, in the order of the pages."""
    found: list[Block] = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        counts: dict[str, int] = {}
        for _, _, language, text in _FENCE.findall(path.read_text(encoding="utf-8")):
            number = counts[language] = counts.get(language, -1) + 1
            found.append(Block(path.stem, language, number, textwrap.dedent(text)))
    return [block for block in found if not languages or block.language in languages]


def program_on(page: str, holding: str) -> str:
    """Return the program of a page that contains a text."""
    (text,) = [b.text for b in blocks("python") if b.page == page and holding in b.text]
    return text


def write_adapters(folder: Path, **strengths: float) -> dict[str, Path]:
    """Adapters of the default model in ``folder``, by name, as the page on LoRA writes them."""
    names: dict[str, Any] = {"__name__": "lora"}
    exec(program_on("lora", "def write_adapter").replace("trio.run(main)", ""), names)
    return {
        name: names["write_adapter"](folder / name, strength=strength)
        for name, strength in strengths.items()
    }


def commands_of(block: Block) -> list[Command]:
    """Return the commands of a session. Without a prompt (``$``), every line is a command."""
    lines = block.text.splitlines()
    has_prompts = any(line.startswith("$ ") for line in lines)
    found: list[Command] = []
    open_line = ""
    for line in lines:
        if open_line:
            open_line += "\n" + line
        elif not has_prompts or line.startswith("$ "):
            open_line = line.removeprefix("$ ")
        else:
            found[-1] = attrs.evolve(found[-1], output=found[-1].output + line + "\n")
            continue
        if _is_whole(open_line):
            found.append(Command(open_line))
            open_line = ""
    assert not open_line, f"{block}: a command has no end: {open_line}"
    return [command for command in found if command.line.strip()]


def _is_whole(line: str) -> bool:
    """Return whether a command line is complete: not within quotes, not continued."""
    if line.endswith("\\"):
        return False
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return False
    return True


def matches(shown: str, printed: str) -> bool:
    """Return whether the printed text is the one that a page shows.

    A number stands for any number, dots for any text, blanks for any blanks.
    """
    parts = re.findall(r" ?(?:…|\.\.\.) ?|\d[\d.]*(?<!\.)|\D", " ".join(shown.split()))
    pattern = ""
    for part in parts:
        if part.strip() in ("…", "..."):
            pattern += ".*"
        else:
            pattern += r"[\d.]+" if part[0].isdigit() else re.escape(part)
    return re.fullmatch(pattern, " ".join(printed.split()), re.DOTALL) is not None
