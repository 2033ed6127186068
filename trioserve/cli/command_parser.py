"""The parser of one command: its options, its help and its errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from trioserve.cli.equivalents import explanation, ignored_text, without_unknown
from trioserve.cli.help import ALL, Formatter, Topic, close_names, plain_name
from trioserve.config.options import Option, OptionGroup, environment_name

_MOST_OPTIONS = 30
"""Most options in a ``--help``; with more, it shows the common ones."""
_MORE = (
    "These are the options of everyday use. --help=all shows all {number}, and --help=NAME one of "
    "them in full, with its page of the documentation."
)


class CommandParser(argparse.ArgumentParser):
    """Parser of one command, with one-line errors and a short ``--help``.

    Args:
        page: Section of the docs about the command.
        more: Arguments of :class:`argparse.ArgumentParser`.
    """

    def __init__(self, *, page: str = "", **more: Any) -> None:
        super().__init__(**more, allow_abbrev=False, formatter_class=Formatter)
        self.page = page
        self.options: dict[str, Option] = {}
        """Options by name."""
        self.pages: dict[str, str] = {}
        """Sections of the docs about the options, by option name."""
        self.variables: set[str] = set()
        """Names of the arguments that have an environment variable."""

    def error(self, message: str) -> NoReturn:
        end = "see" if message.endswith("\n") else "; see"
        self.exit(2, f"{self.prog}: {message}{end} {self.prog} --help\n")

    def format_help(self, *, everything: bool = False) -> str:
        """Return the help. Unless ``everything``, a long list leaves out rare options."""
        leaves_out = len(self.options) > _MOST_OPTIONS and not everything
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        if leaves_out:
            formatter.add_text(_MORE.format(number=len(self.options)))
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_arguments(
                action
                for action in group._group_actions
                if not leaves_out or self._is_common(action)
            )
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _is_common(self, action: argparse.Action) -> bool:
        return action.dest not in self.options or self.options[action.dest].common

    def show_topic(self, name: str) -> NoReturn:
        """Print all help or that of one option, as ``--help=NAME`` asks, and exit."""
        formatter = Formatter(self.prog)
        if name == ALL:
            self._print_message(self.format_help(everything=True), sys.stdout)
            self.exit()
        topics = [self._topic(action) for action in self._actions]
        for topic in topics:
            if plain_name(name) in topic.names:
                self._print_message(topic.text(formatter), sys.stdout)
                self.exit()
        close = close_names(
            name, (flag for each in topics for flag in each.action.option_strings[:1])
        )
        meant = f"; close to it: {', '.join(close)}" if close else ""
        self.exit(
            2, f"{self.prog}: no option is named {name!r}{meant}; see {self.prog} --help=all\n"
        )

    def _topic(self, action: argparse.Action) -> Topic:
        name = action.dest
        return Topic(
            action=action,
            option=self.options.get(name),
            variable=environment_name(name) if name in self.variables else None,
            page=self.pages.get(name, self.page),
        )

    def without_unknown(self, arguments: Sequence[str], *, has_tables: bool) -> list[str]:
        """Return the arguments without ignored options; exit with an error for unknown ones."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        left, found = without_unknown(arguments, flags, has_tables=has_tables)
        refused = [each for each in found if not each.is_ignored]
        if refused:
            self.error(explanation(refused, flags, has_tables=has_tables))
        for each in found:
            print(f"{self.prog}: {ignored_text(each)}", file=sys.stderr)
        return left

    def add_options(
        self,
        options: Iterable[Option],
        groups: Mapping[str, OptionGroup],
        *,
        lists: bool = False,
        variables: bool = False,
    ) -> None:
        """Add the flags of ``options`` by group.

        Args:
            options: The options, in the order of help within a group.
            groups: The groups by name, in the order of help.
            lists: True if a repeatable option may also take several values at once.
            variables: True to name each option's environment variable in its help.
        """
        every = list(options)
        for name, group in groups.items():
            members = [option for option in every if option.group == name]
            if not members:
                continue
            section = self.add_argument_group(group.title)
            for option in members:
                _add_option(section, option, lists=lists)
                self.options[option.name] = option
                self.pages[option.name] = option.page or group.page
                if variables:
                    self.variables.add(option.name)


def _add_option(group: argparse._ArgumentGroup, option: Option, *, lists: bool = False) -> None:
    """Add the flag of ``option``; with ``lists`` a repeatable one takes several values at once."""
    # Values are converted later, like those of variables, so that errors are the same.
    default = f" (default: {option.default_text})" if option.default_text is not None else ""
    common: dict[str, Any] = {
        "dest": option.name,
        "default": argparse.SUPPRESS,
        "help": (option.help + default).replace("%", "%%"),
    }
    if option.kind is bool:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
    elif option.repeatable and lists:
        group.add_argument(
            option.flag, action="extend", nargs="+", metavar=option.value_name, **common
        )
    else:
        action = "append" if option.repeatable else "store"
        group.add_argument(option.flag, action=action, metavar=option.value_name, **common)
