"""The scenario of :mod:`bench.throughput` on the peers alone: ``python -m bench.peers``."""

from __future__ import annotations

import argparse
import sys

from bench.peers.transformers_serve import transformers_server
from bench.throughput import add_options, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    add_options(parser)
    options = parser.parse_args()
    return run([transformers_server(options.dtype, options.peer_python)], options)


if __name__ == "__main__":
    sys.exit(main())
