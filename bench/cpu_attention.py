"""Attention on the CPU: the compiled kernels beside the torch operations, in one run.

``python -m bench.cpu_attention`` attends with the default model's heads: steps of one token for 1
to 32 sequences at several contexts, with and without a prefix that they share, and prompts. Each
layer has a cache of its own; for single tokens there are so many layers that keys and values come
from memory, as between the products of a model. In every round both have their turn, and what the
memory can do is measured in between. Printed are medians over the rounds: of the rate at which keys
and values are read (GB/s) and of arithmetic (GFLOP/s); the ratio is the median, over the rounds, of
torch's time by the compiled kernels'.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import numpy as np
import torch

from bench.report import machine, own_versions, save
from gpu.attention import Attention, CacheShape, StepLayout
from gpu.attention.torch_cpu import TorchCpuAttention
from gpu.cpu.attention import CompiledAttention

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
# Of the keys and values of all layers: several times what caches hold.
TOTAL_BYTES = 1 << 28
MAX_LAYERS = 400
# Of all layers of a prompt: its keys and values are used too often for it to matter where they are.
TOTAL_FLOPS = 1e9
READ_BYTES = 1 << 28


@attrs.frozen(kw_only=True)
class Case:
    """So many sequences of one context each, of which the last ``queries`` tokens are computed.

    The first ``shared`` tokens stand on the same pages for all.
    """

    batch: int
    context: int
    queries: int = 1
    shared: int = 0

    @property
    def name(self) -> str:
        if self.queries == 1:
            shared = f", {self.shared} shared" if self.shared else ""
            return f"{self.batch} x {self.context}{shared}"
        cached = self.context - self.queries
        return f"prompt of {self.queries}" + (f" after {cached}" if cached else "")

    @property
    def bytes_read(self) -> int:
        """Keys and values of one layer, each once."""
        return (self.shared + self.batch * (self.context - self.shared)) * TOKEN_BYTES

    @property
    def flops(self) -> float:
        """Of one layer, counting only keys that a query sees."""
        seen = self.queries * (2 * self.context - self.queries + 1) / 2
        return self.batch * seen * HEADS * HEAD_DIM * 4.0

    @property
    def layers(self) -> int:
        layers = min(MAX_LAYERS, TOTAL_BYTES // self.bytes_read)
        if self.queries > 1:
            layers = min(layers, int(TOTAL_FLOPS / self.flops))
        return max(1, layers)


DECODE = [Case(batch=b, context=c) for c in (128, 512, 2048, 8192) for b in (1, 8, 32)]
SHARED = [Case(batch=b, context=1088, shared=s) for b in (4, 8, 32) for s in (0, 1024)]
PROMPTS = [
    *(Case(batch=1, context=c, queries=c) for c in (128, 512, 2048)),
    Case(batch=1, context=2048, queries=256),
]


@attrs.frozen(kw_only=True)
class Measurement:
    """One layer of one case; for the variant "read" a plain read of memory."""

    variant: str
    case: str
    round: int
    seconds: float
    bytes_read: int
    flops: float


def main() -> None:
    """Parse the command line, measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["decode", "shared", "prompts"])
    parser.add_argument("--threads", type=int, default=machine()["cores"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="seconds of the processor by the number of threads: for a machine that has other work",
    )
    parser.add_argument("--save", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kinds = {"decode": DECODE, "shared": SHARED, "prompts": PROMPTS}
    cases = [case for kind, some in kinds.items() if options.only in (None, kind) for case in some]
    with torch.inference_mode():
        measurements = [m for case in cases for m in _measure(case, options)]
    table = _table(measurements)
    print(table)
    facts = {
        "versions": own_versions(),
        "options": {**vars(options), "save": None},
        "table": table,
    }
    print(save(options.save, "cpu-attention", measurements, facts))


def _measure(case: Case, options: argparse.Namespace) -> Iterator[Measurement]:
    def seconds_of(work: Callable[[], object]) -> float:
        clock = time.process_time if options.cpu_time else time.perf_counter
        began = clock()
        work()
        return (clock() - began) / (options.threads if options.cpu_time else 1)

    shared_pages = case.shared // PAGE_SIZE
    own_pages = -(-case.context // PAGE_SIZE) - shared_pages
    num_pages = shared_pages + case.batch * own_pages
    shape = CacheShape(
        num_layers=case.layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    table = torch.zeros(case.context, HEAD_DIM)  # nothing is rotated
    compiled = CompiledAttention(
        shape, HEADS, table, max_tokens=case.batch * case.queries, threads=options.threads
    )
    plain = TorchCpuAttention(shape, HEADS, table)
    pages = np.random.default_rng(0).permutation(num_pages)
    first = np.tile(pages[:shared_pages], (case.batch, 1))
    tables = np.hstack([first, pages[shared_pages:].reshape(case.batch, -1)])
    q = torch.randn(case.batch * case.queries, HEADS, HEAD_DIM).bfloat16()
    attentions: list[Attention] = [compiled, plain]
    for attention in attentions:
        _fill(attention, case, tables)
        attention.begin(_layout(tables, np.full(case.batch, case.context), case.queries))
    variants: dict[str, Callable[[], object]] = {
        "compiled": lambda: compiled.attend_layers(range(case.layers), q, None),
        "torch": lambda: [plain.attend(layer, q, None) for layer in range(case.layers)],
    }
    buffer = torch.zeros(READ_BYTES // 8, dtype=torch.int64)
    for number in range(options.rounds):
        yield Measurement(
            variant="read", case="", round=number, seconds=seconds_of(buffer.sum),
            bytes_read=READ_BYTES, flops=0.0,
        )  # fmt: skip
        for name, work in variants.items():
            yield Measurement(
                variant=name, case=case.name, round=number,
                seconds=min(seconds_of(work) for _ in range(3)) / case.layers,
                bytes_read=case.bytes_read, flops=case.flops,
            )  # fmt: skip
    compiled.close()


def _layout(
    tables: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    contexts: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    queries: int,
) -> StepLayout:
    """Each row's last ``queries`` tokens."""
    rows = len(contexts)
    return StepLayout(
        positions=np.concatenate([np.arange(end - queries, end) for end in contexts.tolist()]),
        query_start=np.arange(rows + 1) * queries,
        context_lens=contexts,
        slots=np.arange(rows),
        block_tables=tables.astype(np.int32),
        num_decode_rows=rows if queries == 1 else 0,
    )


def _fill(
    attention: Attention, case: Case, tables: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
) -> None:
    """Write all keys and values, sequence by sequence."""
    qkv = torch.randn(case.context, HEADS + 2 * KV_HEADS, HEAD_DIM).bfloat16()
    for row in range(case.batch):
        attention.begin(_layout(tables[row : row + 1], np.array([case.context]), case.context))
        for layer in range(case.layers):
            attention.rope_and_write(layer, qkv, False)


def _table(measurements: list[Measurement]) -> str:
    reads = [m.bytes_read / m.seconds / 1e9 for m in measurements if m.variant == "read"]
    lines = [
        f"memory read: median {statistics.median(reads):.1f} GB/s, best {max(reads):.1f}",
        "",
        "| case | variant | µs a layer | best | GB/s | % of read | GFLOP/s | torch / this |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(m.case for m in measurements if m.case):
        base = [m.seconds for m in measurements if (m.case, m.variant) == (case, "torch")]
        for variant in ("compiled", "torch"):
            chosen = [m for m in measurements if (m.case, m.variant) == (case, variant)]
            seconds = [m.seconds for m in chosen]
            middle = statistics.median(seconds)
            rate = chosen[0].bytes_read / middle / 1e9
            ratio = statistics.median(a / b for a, b in zip(base, seconds, strict=True))
            lines.append(
                f"| {case} | {variant} | {middle * 1e6:.0f} | {min(seconds) * 1e6:.0f} "
                f"| {rate:.1f} | {100 * rate / statistics.median(reads):.0f} "
                f"| {chosen[0].flops / middle / 1e9:.0f} | {ratio:.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
