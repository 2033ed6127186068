"""The ranks of several stages behind rank 0: they do what it says, and have no slots."""

from __future__ import annotations

import time

import attrs
import numpy as np
import torch

from gpu.attention import Attention
from gpu.models.decoder import Decoder
from gpu.models.parallel.adapters import FollowingAdapters
from gpu.models.parallel.layouts import layout_of
from gpu.models.parallel.link import RankLink
from gpu.models.parallel.pipeline import PipelineGroup
from gpu.models.parallel.steps import (
    Compute,
    CopyPages,
    LoadOnRanks,
    ReturnResults,
    UnloadOnRanks,
    decode_step,
)
from gpu.sampling.prompt_logprobs import rows_in_a_slice


@attrs.define(eq=False)
class StageSteps:
    """The steps of one rank: of its stage, and of what rank 0 gets back."""

    _link: RankLink
    _group: PipelineGroup
    _decoder: Decoder
    _attention: Attention
    _adapters: FollowingAdapters
    _vocab_size: int
    _hidden: torch.Tensor = attrs.field(init=False, factory=lambda: torch.empty(0, 0))
    """Hidden states of the last step that was computed."""
    _took_us: int = attrs.field(init=False, default=0)
    """Microseconds that it took this stage."""

    def follow(self) -> None:
        """Do what rank 0 says, step by step."""
        while True:
            match decode_step(self._link.receive()):
                case Compute() as step:
                    self.compute(step)
                case ReturnResults() as step:
                    self.return_results(step)
                case LoadOnRanks() as step:
                    self._adapters.load(step)
                case UnloadOnRanks() as step:
                    self._adapters.unload(step)
                case CopyPages(copies=pairs):
                    self._attention.copy_pages(np.frombuffer(pairs, dtype=np.int32).reshape(-1, 2))

    def compute(self, step: Compute) -> None:
        """Compute the stage's layers, and give their states to the next stage."""
        self._attention.begin(layout_of(step))
        adapted = self._adapters.groups(step.adapted)
        tokens = torch.from_numpy(np.frombuffer(step.tokens, dtype=np.int64).copy())
        decoder = self._decoder
        if self._group.stage == 0:
            began = time.perf_counter_ns()
            hidden = decoder.forward(tokens, self._attention, adapted)
        else:
            hidden = torch.empty(len(tokens), decoder.config.hidden_size, dtype=decoder.dtype)
            self._group.take_over(hidden)
            began = time.perf_counter_ns()
            hidden = decoder.go_on(hidden, self._attention, adapted)
        self._took_us = (time.perf_counter_ns() - began) // 1000
        self._group.pass_on(hidden)
        self._hidden = hidden

    def return_results(self, step: ReturnResults) -> None:
        """Send what the step is for to rank 0 from the last stage; else a time to the next one."""
        slowest = torch.zeros(1, dtype=torch.int64)
        if self._group.stage > 0:
            self._group.take_over(slowest)
        if not self._group.is_last:
            self._group.pass_on(slowest.clamp(min=self._took_us))
            return
        began = time.perf_counter_ns()
        hidden, give_back = self._hidden, self._group.give_back
        for first, stop in step.pooled:
            give_back(hidden[first:stop].float())
        size = rows_in_a_slice(self._vocab_size)
        for first, stop in step.scored:
            for start in range(first, stop, size):
                give_back(self._decoder.logits(hidden[start : min(start + size, stop)]))
        if step.drawn:
            drawn = torch.frombuffer(bytearray(step.drawn), dtype=torch.int64)
            give_back(self._decoder.logits(hidden.index_select(0, drawn)))
        took_us = self._took_us + (time.perf_counter_ns() - began) // 1000
        give_back(slowest.clamp(min=took_us))
