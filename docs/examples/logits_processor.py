"""A class of your own that changes logits: ``python docs/examples/logits_processor.py``.

This one keeps tokens out of outputs. The worker process imports it by the name of this module.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

import trioserve
from trioserve.protocol.logits_processors import ProcessorContext, ProcessorRow

if TYPE_CHECKING:
    import torch


class WithoutTokens:
    """A processor that keeps the token ids in a request's ``without`` out of its output."""

    parameters = ("without",)

    def __init__(self, context: ProcessorContext) -> None:
        self.without: dict[int, list[int]] = {}

    def check(self, args: Mapping[str, Any]) -> bool:
        return bool(args.get("without"))

    def open(self, slot: int, args: Mapping[str, Any]) -> None:
        self.without[slot] = args["without"]

    def close(self, slot: int) -> None:
        del self.without[slot]

    def apply(
        self, logits: "torch.Tensor", bias: "torch.Tensor", rows: Sequence[ProcessorRow]
    ) -> None:
        for row in rows:
            bias[row.index, self.without[row.slot]] = float("-inf")


async def main() -> None:
    # The worker imports the module from here, unless it is installed.
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    async with trioserve.open_engine(
        "smollm2-135m", logits_processors=("logits_processor:WithoutTokens",)
    ) as engine:
        digits = [token for digit in "0123456789" for token in engine.tokenizer.encode(digit)]
        for extra_args in ({}, {"without": digits}):
            completion = await engine.complete(
                "Count: 1, 2, 3,", max_tokens=12, temperature=0, extra_args=extra_args
            )
            print("without digits:" if extra_args else "as it is:", repr(completion.text))


if __name__ == "__main__":
    trio.run(main)
