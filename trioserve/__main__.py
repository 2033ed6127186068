"""``python -m trioserve`` is the command ``trioserve``."""

from trioserve.cli import run

run()
