"""Rank 0 of a worker, or another rank, as a process: on a GPU, or on an emulated one.

``python -m tests.kernels.rank_process MODEL SIZE STAGES`` loads a model on so many ranks in each of
so many stages, as a worker does, and says "ready". For a line on its standard input it runs plans,
and prints the tokens of two slots; if that line is "fail", its first step fails. With
``--emulated`` its GPU is, and so is that of the others, which are started with ``--rank`` then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpu.cpu import following as rank_following
from gpu.cuda import following, loading_parts
from gpu.cuda import loading as cuda_loading
from gpu.loading import loading
from gpu.loading.loaded_model import unseen
from gpu.models.parallel.group import RankGroup
from tests.kernels.tape import TapedRanks
from tests.kernels.test_cuda_loading import FakeGpu, start
from tests.kernels.test_whole_model import PROMPTS, run_ahead
from tests.support.plans import PlanMaker

BOTH = {0: 1, 1: 1}
PLANS = [{0: 30, 1: 5}, {0: 36, 1: 1}, BOTH, BOTH, {1: 1}, {}, BOTH, BOTH]
"""Prompts in chunks, mixed steps, decode steps, and one with nothing to do."""
NUM_PAGES = 64
COMMAND = "tests.kernels.rank_process"


def emulate_gpu() -> None:
    """Put an emulated GPU in the place of this process's, and start other ranks with one."""
    fake, popen = FakeGpu(), subprocess.Popen

    def make_group(rendezvous: str, rank: int, size: int, stages: int, gpu: object) -> TapedRanks:
        return TapedRanks(RankGroup(rendezvous, rank, size, stages), fake.loader)

    def start_emulated(command: list[str], **options: Any) -> Any:
        if command[1:] == ["-P", "-m", "gpu", "--rank"]:
            command = [*command[:3], COMMAND, "--emulated", "--rank"]
        return popen(command, **options)

    for module in (cuda_loading, following):
        module.open_gpu = lambda device, threads: fake  # type: ignore[attr-defined]
    loading_parts.RankGroup = make_group  # type: ignore[attr-defined]
    subprocess.Popen = start_emulated  # type: ignore[assignment,misc]
    loading.choose_device = lambda name, num_gpus: "cuda:4"


def lead(folder: Path, size: int, num_stages: int) -> None:
    """Be the worker's process."""
    options = {"num_pages": NUM_PAGES, "max_num_batched_tokens": 128, "tensor_parallel_size": size}
    message = start(folder, pipeline_parallel_size=num_stages, **options)
    serving = loading.load(message, unseen)
    print("ready", flush=True)
    line = sys.stdin.readline()
    if line == "fail\n":
        executor: Any = serving.runner._executor
        executor._forward.run = None
    maker = PlanMaker(serving.runner.step, page_size=16, num_pages=NUM_PAGES)
    maker.open(0, PROMPTS[3])
    maker.open(1, PROMPTS[1])
    server: Any = SimpleNamespace(runner=serving.runner, maker=maker)
    if num_stages == 1:
        run_ahead(server, PLANS)
    else:  # A row needs its token first.
        for rows in PLANS:
            maker.step(rows)
    print(json.dumps([maker.slots[slot].tokens for slot in (0, 1)]), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--rank", action="store_true")
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("size", nargs="?", type=int)
    parser.add_argument("stages", nargs="?", type=int)
    asked = parser.parse_args()
    if asked.emulated:
        emulate_gpu()
    if asked.rank:
        rank_following.run()
    else:
        lead(asked.model, asked.size, asked.stages)
