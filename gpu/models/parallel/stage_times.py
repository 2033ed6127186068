"""The measured times of stages, and the split of layers that follows from them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from gpu.models.parallel.stage_link import StageLink
from gpu.models.parallel.stages import Stage, split_layers, weights_read

_STEPS = 1_000
"""Steps that are measured before the log tells of them."""
_GAIN = 0.05
"""Least part of the slowest stage's time for which another split is worth a line."""
_log = logging.getLogger("gpu.worker")


def no_times(stages: StageLink) -> npt.NDArray[np.int64]:
    """Return a place for the times of a step, [P + 1]: of each stage's layers, and of the head."""
    return np.zeros(stages.num_stages + 1, dtype=np.int64)


@attrs.define(eq=False)
class StageTimes:
    """The times of the steps so far. The log tells of them once there are enough.

    Args:
        stages: The stages of the model, in order.
    """

    _stages: Sequence[Stage]
    _num_steps: int = attrs.field(init=False, default=0)
    _sums: npt.NDArray[np.int64] = attrs.field(init=False)
    """[P + 1], microseconds of all steps."""

    def __attrs_post_init__(self) -> None:
        self._sums = np.zeros(len(self._stages) + 1, dtype=np.int64)

    def add(self, took_us: npt.NDArray[np.int64]) -> None:
        """Count a step of these microseconds, [P + 1]: of each stage's layers, and of the head."""
        self._num_steps += 1
        self._sums += took_us
        if self._num_steps == _STEPS:
            _log.info("%s", self.describe())

    def describe(self) -> str:
        """Return the mean times in words, with the split that would be better, if one would."""
        means = self._sums / max(self._num_steps, 1)
        times = " + ".join(f"{each / 1000:.1f}" for each in with_head(means))
        counts = [stage.stop - stage.first for stage in self._stages]
        told = f"stages of {' + '.join(map(str, counts))} layers took {times} ms a step"
        better, longest = self._best_split(means)
        if longest > (1 - _GAIN) * with_head(means).max():
            return f"{told}: no other split is much better"
        option = ",".join(str(len(each)) for each in better)
        return (
            f"{told}: with --pipeline-parallel-layers {option} the slowest would take "
            f"{longest / 1000:.1f} ms"
        )

    def _best_split(self, means: npt.NDArray[np.float64]) -> tuple[list[range], float]:
        """Return the best split by the measured times, and its slowest stage's microseconds.

        A stage takes a time for each weight that its layers read, and the machines may differ.
        """
        whole = self._stages[0].whole
        layers = [weights_read(whole, layer) for layer in range(whole.num_layers)]
        paces = [
            float(time) / sum(layers[stage.first : stage.stop])
            for stage, time in zip(self._stages, means[:-1], strict=True)
        ]
        head = float(means[-1])
        split = split_layers(layers, paces, head=head)
        times = [
            pace * sum(layers[part.start : part.stop])
            for pace, part in zip(paces, split, strict=True)
        ]
        return split, max(*times[:-1], times[-1] + head)


def with_head(times: npt.NDArray[np.number]) -> npt.NDArray[np.number]:
    """Return the times of P stages, [P], the last of which has the head."""
    stages = times[:-1].copy()
    stages[-1] += times[-1]
    return stages
