"""``python -m trioserve`` is the command ``trioserve``."""

from trioserve.cli.commands import run

run()
