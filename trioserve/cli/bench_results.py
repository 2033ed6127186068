"""The results of ``trioserve bench``, and the files that they are written to."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import attrs

from trioserve.cli.bench_options import BenchOptions
from trioserve.cli.usage import UsageError
from trioserve.load.measure import Measured
from trioserve.load.report import as_json
from trioserve.protocol.errors import TrioserveError
from trioserve.protocol.log_output import escaped
from trioserve.protocol.machine import extra_advice


def check_outputs(options: BenchOptions) -> None:
    """Check, before a long run, that its results can be written.

    Raises:
        UsageError: They can't be; the message names the option.
    """
    for flag, given in (("--json", options.json), ("--html", options.html)):
        if given is not None:
            _check_file(flag, Path(given).absolute())
    if options.plots is not None:
        _check_folder("--plots", Path(options.plots).absolute())
    for flag, given in (("--plots", options.plots), ("--html", options.html)):
        if given is not None and importlib.util.find_spec("matplotlib") is None:
            raise UsageError(f"{flag} needs matplotlib: {extra_advice('bench')}")


def _check_file(flag: str, file: Path) -> None:
    if file.is_dir():
        raise UsageError(f"{flag}: {file} is a folder")
    if not file.parent.is_dir():
        raise UsageError(f"{flag}: there is no folder {file.parent}")
    _check_writable(flag, file if file.exists() else file.parent)


def _check_folder(flag: str, folder: Path) -> None:
    """Check that ``folder``, or the nearest existing one above it, can be written to."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"{flag}: {there} is no folder")
    _check_writable(flag, there)


def _check_writable(flag: str, path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise UsageError(f"{flag}: {path} can't be written to")


@attrs.define(eq=False)
class BenchResults:
    """The measurements so far, and facts about their server and options."""

    options: BenchOptions
    facts: dict[str, Any] = attrs.field(factory=dict)
    """Facts for the JSON file and the page, beside the figures."""
    measured: list[Measured] = attrs.field(factory=list)
    planned: list[str] = attrs.field(factory=list)
    """Labels of all points."""

    def write(self) -> None:
        """Write the files that the options name, unless nothing was measured.

        The files list the points that weren't measured.

        Raises:
            TrioserveError: A file can't be written.
        """
        if not self.measured:
            return
        left = self.planned[len(self.measured) :]
        if left:
            self.facts["not_measured"] = left
            note(f"not measured: {'; '.join(left)}")
        if self.options.json is not None:
            data = as_json(self.measured, self.facts, records=self.options.records)
            _write(Path(self.options.json), data)
        if self.options.plots is not None or self.options.html is not None:
            self._draw()

    def _draw(self) -> None:
        # matplotlib is an extra, and takes a second to load.
        from trioserve.load.report_html import page
        from trioserve.load.report_plots import plots, save_plots

        drawn = list(plots(self.measured))
        if self.options.plots is not None:
            folder = Path(self.options.plots)
            try:
                paths = save_plots(drawn, folder)
            except OSError as error:
                raise _unwritten(folder, error) from error
            for path in paths:
                note(f"wrote {path}")
        if self.options.html is not None:
            _write(Path(self.options.html), page(self.measured, drawn, self.facts).encode())


def _write(file: Path, data: bytes) -> None:
    try:
        file.write_bytes(data)
    except OSError as error:
        raise _unwritten(file, error) from error
    note(f"wrote {file}")


def _unwritten(path: Path, error: OSError) -> TrioserveError:
    # An error of open() names the file; one of write(), as on a full disk, doesn't.
    return TrioserveError(f"{error.filename or path} can't be written: {error.strerror}")


def note(line: str) -> None:
    """Print a line that isn't a result to stderr."""
    print(escaped(line, keep="\n\t"), file=sys.stderr, flush=True)
