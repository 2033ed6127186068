"""``python -P -m trioserve.front_ends --connect URL --index 0 --listen 3,4`` is a front end."""

from __future__ import annotations

import argparse
import signal

from trioserve.protocol.gc_tuning import without_gc


def main() -> None:
    """Parse the command line and serve."""
    # A request for a task dump during the imports must not end the process. A signal to all
    # processes at once, as service managers send it, is for the engine's, which ends this one in
    # order.
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m trioserve.front_ends", description=__doc__)
    parser.add_argument("--connect", metavar="URL", required=True, help="where the engine listens")
    parser.add_argument(
        "--listen", metavar="N,…", required=True, help="descriptors of listening sockets"
    )
    parser.add_argument("--index", type=int, required=True, help="which front end this is")
    options = parser.parse_args()
    with without_gc():
        from trioserve.front_ends.client.main import run
    run(options.connect, options.index, [int(number) for number in options.listen.split(",")])


if __name__ == "__main__":
    main()
