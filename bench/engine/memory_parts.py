"""The parts of this server's memory: ``python -m bench.engine.memory_parts``.

The same server in the same state as in the scenario ``memory`` of ``bench.compare``, process by
process. The weights count as the file has them, since they are packed into as many bytes, and the
KV cache as far as tokens have filled it. What a process's imports take is measured in another that
does nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import trio

from bench.compare.scenarios import Memory
from bench.peers.model_files import gguf_file
from bench.peers.servers import own_server
from bench.report import markdown, script
from bench.servers import Family, running
from gpu.loading.memory import kv_bytes_per_page
from trioserve.model_files import open_model

_SERVER, _WORKER = "trioserve.cli.serve", "gpu.worker, gpu.cpu.loading"
_IMPORT = """
import {modules}
for line in open("/proc/self/smaps_rollup"):
    if line.startswith("Pss:"):
        print(line.split()[1])
"""


async def parts_of(format: str) -> dict[tuple[str, str], float]:
    """Return the bytes of each part of a server whose cache has been filled."""
    scenario = Memory()
    async with running(own_server(scenario.setting(format))) as one:
        await scenario.fill(one, f"parts, {format}")
        whole = one.family.pss_bytes()
        (worker,) = [each for each in one.family.members() if "gpu" in each.cmdline()]
        in_worker = Family(worker.pid).pss_bytes()
    files = open_model(gguf_file(format))
    assert files.gguf_header is not None
    weights = sum(tensor.num_bytes for tensor in files.gguf_header.tensors.values())
    tokens = scenario.streams * (scenario.prompt_tokens + scenario.output_tokens)
    cache = tokens * kv_bytes_per_page(files.config, 1, 2)
    server_imports, worker_imports = [await _imports(each) for each in (_SERVER, _WORKER)]
    return {
        ("server", "Python and what it imports"): server_imports,
        ("server", "tokenizer and all else"): whole - in_worker - server_imports,
        ("worker", "weights"): weights,
        ("worker", "KV cache"): cache,
        ("worker", "Python and what it imports"): worker_imports,
        ("worker", "a step's room and all else"): in_worker - weights - cache - worker_imports,
        ("both", "all"): whole,
    }


async def _imports(modules: str) -> int:
    """Return the bytes of a process that has imported ``modules``."""
    command = [sys.executable, "-c", _IMPORT.format(modules=modules)]
    return int((await trio.run_process(command, capture_stdout=True)).stdout) * 1024


@script
async def measure(*, formats: Sequence[str] = ("bf16", "q4_1")) -> str:
    """Return a table with a column for each format."""
    found = [await parts_of(format) for format in formats]
    lines = [[*part, *(f"{sizes[part] / 2**20:.0f}" for sizes in found)] for part in found[0]]
    return markdown(["process", "PSS, MiB", *formats], lines)
