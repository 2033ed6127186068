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


def prompts(count: int, tokens: int, seed: int) -> list[str]:
    """``count`` random texts of ``tokens`` letters: as many tokens to a model of bytes."""
    chooser = random.Random(seed)
    return ["".join(chooser.choices(string.ascii_letters, k=tokens)) for _ in range(count)]


def main() -> int:
    """Send one request on each stream and print what came of it; 1 if a request failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.decode_step.clients", description=__doc__
    )
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--output-tokens", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    target = Target(
        connect=over_tcp(options.url),
        path="/v1/completions",
        fields={
            "model": options.model,
            "temperature": 0.8,
            "ignore_eos": True,
            "max_tokens": options.output_tokens,
            "stream_options": {"include_usage": True},
        },
    )
    texts = prompts(options.streams, options.prompt_tokens, options.seed)
    requests = [{"prompt": text, "seed": options.seed + i} for i, text in enumerate(texts)]
    print("ready", flush=True)
    sys.stdin.readline()
    run = trio.run(closed_loop, target, requests, options.streams)
    figures = figures_of(run)
    errors = sorted({record.error for record in run.records if record.error})
    print(json.dumps({"figures": attrs.asdict(figures), "errors": errors}))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
