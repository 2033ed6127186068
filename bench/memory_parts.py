"""What this server's memory is made of: ``python -m bench.memory_parts``.

The same server in the same state as in ``bench.memory``, process by process. The weights are
counted as the file has them, since they are packed into as many bytes, and the KV cache as far as
tokens have filled it. What a process's imports take is measured in another that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs
import trio

from bench.family import Family, family
from bench.memory import Memory
from bench.peers.environments import KEPT
from bench.peers.gguf_files import model_file
from bench.peers.own_server import own_server
from bench.prompts import exact_prompts, tokenizer
from bench.report import markdown, show
from bench.servers import MODEL, running
from bench.validity import check
from gpu.loading.memory import kv_bytes_per_page
from trioserve.load import closed_loop
from trioserve.model_files import open_model

__all__ = ["Part", "main", "parts_of", "table"]

FORMATS = ("bf16", "q4_1")
_SERVER, _WORKER = "trioserve.cli.serve", "gpu.worker, gpu.cpu.loading"
_IMPORT = """
import {modules}
for line in open("/proc/self/smaps_rollup"):
    if line.startswith("Pss:"):
        print(line.split()[1])
"""


@attrs.frozen(kw_only=True)
class Part:
    """So much of the memory of one process."""

    format: str
    process: str
    part: str
    mib: float


async def parts_of(format: str, log: Path) -> list[Part]:
    """The parts of a server whose cache has been filled."""
    scenario = Memory()
    server = own_server(scenario.setting(format))
    prompts = exact_prompts(
        tokenizer(), scenario.streams, scenario.prompt_tokens, f"parts, {format}"
    )
    async with running(server, log) as one:
        bodies = [{"prompt": prompt, "max_tokens": scenario.output_tokens} for prompt in prompts]
        run = await closed_loop(one.target, bodies, scenario.streams)
        check(server.title, run, scenario.prompt_tokens, scenario.output_tokens)
        whole = one.family.pss_bytes()
        (worker,) = [pid for pid in family(one.process.pid) if "gpu" in _command(pid)]
        in_worker = Family(worker).pss_bytes()
    files = open_model(model_file(MODEL, format, KEPT))
    assert files.gguf_header is not None
    weights = sum(tensor.num_bytes for tensor in files.gguf_header.tensors.values())
    tokens = scenario.streams * (scenario.prompt_tokens + scenario.output_tokens)
    cache = tokens * kv_bytes_per_page(files.config, 1, 2)
    python = {modules: await _imports(modules) for modules in (_SERVER, _WORKER)}
    in_server = whole - in_worker
    sizes = [
        ("server", "Python and what it imports", python[_SERVER]),
        ("server", "tokenizer and all else", in_server - python[_SERVER]),
        ("worker", "weights", weights),
        ("worker", "KV cache", cache),
        ("worker", "Python and what it imports", python[_WORKER]),
        ("worker", "a step's room and all else", in_worker - weights - cache - python[_WORKER]),
    ]
    return [
        Part(format=format, process=process, part=part, mib=size / 2**20)
        for process, part, size in sizes
    ]


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


async def _imports(modules: str) -> int:
    """Bytes of a process that has imported ``modules``."""
    done = await trio.run_process(
        [sys.executable, "-c", _IMPORT.format(modules=modules)], capture_stdout=True
    )
    return int(done.stdout) * 1024


def table(parts: Sequence[Part]) -> str:
    """Markdown: a column for each format."""
    formats = list(dict.fromkeys(part.format for part in parts))
    sizes = {(part.process, part.part, part.format): part.mib for part in parts}
    lines = [
        [process, name, *(f"{sizes[process, name, format]:.0f}" for format in formats)]
        for process, name in dict.fromkeys((part.process, part.part) for part in parts)
    ]
    sums = [sum(part.mib for part in parts if part.format == format) for format in formats]
    lines.append(["both", "all", *(f"{size:.0f}" for size in sums)])
    return markdown(["process", "PSS, MiB", *formats], lines)


async def _run(formats: Sequence[str]) -> list[Part]:
    found: list[Part] = []
    with tempfile.TemporaryDirectory() as folder:
        for format in formats:
            print(f"filling the cache of {format}", flush=True)
            found += await parts_of(format, Path(folder) / format)
    return found


def main(arguments: list[str]) -> int:
    """Measure, print a table, and save it if asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory_parts", description=__doc__)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--save", type=Path, help="a folder for the JSON")
    options = parser.parse_args(arguments)
    parts = trio.run(_run, options.formats)
    show(table(parts), options.save, "memory-parts", parts)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
