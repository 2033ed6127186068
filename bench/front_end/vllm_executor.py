"""vLLM's executor interface without a model: what trioserve's ``--mock-worker`` is to trioserve.

Runs inside vLLM's own environment (``--distributed-executor-backend
bench.front_end.vllm_executor.MockExecutor``), so it imports nothing of this project. The engine
core, its scheduler and block pool, the process boundary and the API server are vLLM's own. Steps
give the tokens ``MOCK_TOKENS`` (ids with commas), one after another, and take the seconds that
stand in the file ``MOCK_STEP_FILE``, which is read whenever no request is left.
With asynchronous scheduling the next step is made while one "runs", as on a GPU.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

_LAYER = "model.layers.0.self_attn.attn"
_CACHE_BYTES = 1 << 30


class _Running(Future):  # type: ignore[type-arg]
    """A step's result, complete at ``ends`` on the performance counter."""

    def __init__(self, output: ModelRunnerOutput | None, ends: float) -> None:
        super().__init__()
        self.set_result(output)
        self._ends = ends

    def result(self, timeout: float | None = None) -> Any:
        left = self._ends - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return super().result(timeout)


class MockExecutor(Executor):
    """An executor that gives each scheduled request whose prompt is computed its next token."""

    def _init_executor(self) -> None:
        self._step_file = Path(os.environ["MOCK_STEP_FILE"])
        self._step_seconds = 0.0
        self._tokens = [int(token) for token in os.environ["MOCK_TOKENS"].split(",")]
        self._left: dict[str, int] = {}
        """Tokens of the prompt that haven't been scheduled."""
        self._given: dict[str, int] = {}
        self._output: ModelRunnerOutput | None = None
        self._ends = 0.0

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> list[Any]:
        answers = {
            "get_kv_cache_spec": self._kv_cache_spec,
            "get_supported_kv_cache_layouts": lambda: ["LBHNC"],
            "determine_available_memory": lambda: _CACHE_BYTES,
            "compile_or_warm_up_model": lambda: CompilationTimes(0.0, 0.0),
            "get_supported_tasks": lambda: ("generate",),
        }
        return [answers[method]() if method in answers else None]

    def _kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        size = self.cache_config.block_size
        sizes = {"block_size": size, "num_kv_heads": 1, "head_size": 64, "dtype": torch.half}
        return {_LAYER: FullAttentionSpec(**sizes)}

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        self._output = self._step(scheduler_output)
        # One device: a step begins when the one before it has ended.
        self._ends = max(time.perf_counter(), self._ends) + self._step_seconds
        return _Running(None, 0.0) if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        output, self._output = self._output, None
        future = _Running(output, self._ends)
        return future if non_block else future.result()

    def _step(self, scheduled: Any) -> ModelRunnerOutput:
        for request in scheduled.finished_req_ids:
            self._left.pop(request, None)
            self._given.pop(request, None)
        if not self._given:
            self._step_seconds = float(self._step_file.read_text())
        for new in scheduled.scheduled_new_reqs:
            self._left[new.req_id] = new.prompt_len - new.num_computed_tokens
            self._given[new.req_id] = 0
        requests = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=requests,
            req_id_to_index={request: index for index, request in enumerate(requests)},
            sampled_token_ids=[self._next(*row) for row in scheduled.num_scheduled_tokens.items()],
        )

    def _next(self, request: str, count: int) -> list[int]:
        """Return the token that a row of ``count`` tokens draws; none within the prompt."""
        left = self._left[request]
        if left > 0:
            self._left[request] = left = left - count
            if left > 0:
                return []
        given = self._given[request]
        self._given[request] = given + 1
        return [self._tokens[given % len(self._tokens)]]

    def check_health(self) -> None:
        """Do nothing: it is always well."""

    def shutdown(self) -> None:
        """Do nothing."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True
