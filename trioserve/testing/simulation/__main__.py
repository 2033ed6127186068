"""``python -m trioserve.testing.simulation``"""

from trioserve.testing.simulation.command import run

run()
