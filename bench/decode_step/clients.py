"""Streaming clients in a process of their own: ``python -m bench.decode_step.clients URL ...``.

One Python process reads some 20,000 events a second; several of these together don't hold up the
server that they measure. Says ``ready`` and waits for a line on standard input, so that all begin
together however long each took to start; then prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys

import attrs
import trio

from trioserve.load import Target, closed_loop, figures_of, over_tcp


def main() -> int:
    """Send one request on each stream and print what came of it; return 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    for name in ("--streams", "--prompt-tokens", "--output-tokens", "--seed"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    fields = {"model": options.model, "temperature": 0.8, "ignore_eos": True}
    fields |= {"max_tokens": options.output_tokens, "stream_options": {"include_usage": True}}
    target = Target(connect=over_tcp(options.url), path="/v1/completions", fields=fields)
    # As many letters as tokens to a model of bytes.
    draw, tokens = random.Random(options.seed), options.prompt_tokens
    texts = ["".join(draw.choices(string.ascii_letters, k=tokens)) for _ in range(options.streams)]
    requests = [{"prompt": text, "seed": options.seed + i} for i, text in enumerate(texts)]
    print("ready", flush=True)
    sys.stdin.readline()
    run = trio.run(closed_loop, target, requests, options.streams)
    errors = sorted({record.error for record in run.records if record.error})
    print(json.dumps({"figures": attrs.asdict(figures_of(run)), "errors": errors}))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
