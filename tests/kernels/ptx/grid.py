"""Run a block: one thread after the other, or all at once by smallest program counter.

Of the threads that can go on, the last one does, as far as it gets. What the others were to do
before has not happened then, unless a barrier says so.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.kernels.ptx.arithmetic import RESULTS
from tests.kernels.ptx.machine import WARP, Array, Block
from tests.kernels.ptx.memory import memory_operation
from tests.kernels.ptx.text import Instruction, PtxError, Register, Symbol
from tests.kernels.ptx.warps import BLOCK_MEETINGS, WARP_MEETINGS, members

__all__ = ["run_block"]


def run_block(block: Block, executed: set[str], *, together: bool) -> None:
    """Run all threads to their end; add the opcodes to ``executed``.

    Args:
        together: all threads at the smallest program counter go on, which is faster. It hides a
            missing barrier.

    Raises:
        PtxError: an opcode is unknown, or threads wait for others in vain.
    """
    run = _Run(block, executed)
    while not run.exited.all():
        ready = np.flatnonzero(~run.exited & ~run.waiting)
        if not len(ready):
            raise PtxError(f"{block.entry.name}: threads wait for others that don't come")
        if not together:
            ready = ready[-1:]
        counters = run.counters[ready]
        run.step(ready[counters == counters.min()])


class _Run:
    """The position of each thread of a block."""

    def __init__(self, block: Block, executed: set[str]) -> None:
        self.block = block
        self.executed = executed
        self.counters = np.zeros(block.num_threads, np.int64)
        self.waiting = np.zeros(block.num_threads, bool)
        self.exited = np.zeros(block.num_threads, bool)

    def step(self, threads: Array) -> None:
        """Execute the instruction at which all of ``threads`` are."""
        at = int(self.counters[threads[0]])
        instruction = self.block.entry.instructions[at]
        opcode = instruction.opcode
        self.executed.add(opcode)
        if opcode in WARP_MEETINGS or opcode in BLOCK_MEETINGS:
            if instruction.predicate:
                raise PtxError(f"{opcode} with a predicate")
            self.waiting[threads] = True
            self._meet(at, instruction, threads)
            return
        active = threads
        if instruction.predicate:
            values = self.block.read(Register(instruction.predicate), threads) != 0
            active = threads[values != instruction.negated]
        self.counters[threads] += 1
        if opcode in ("bra", "bra.uni"):
            (label,) = instruction.operands
            assert isinstance(label, Symbol)
            self.counters[active] = self.block.entry.labels[label.name]
        elif opcode == "ret":
            self.exited[active] = True
        elif len(active):
            self._execute(instruction, active)

    def _execute(self, instruction: Instruction, threads: Array) -> None:
        if instruction.opcode in RESULTS:
            target, *sources = instruction.operands
            bits = RESULTS[instruction.opcode](*(self.block.read(x, threads) for x in sources))
            self.block.write(target, threads, bits)
            return
        operation = memory_operation(instruction.opcode)
        if operation is None:
            raise PtxError(f"{self.block.entry.name}: unknown opcode {instruction.opcode}")
        operation(self.block, instruction, threads)

    def _meet(self, at: int, instruction: Instruction, arrived: Array) -> None:
        """Let those go on that have all met."""
        here = self.waiting & (self.counters == at)
        if instruction.opcode in BLOCK_MEETINGS:
            if (here | self.exited).all():
                self._go_on(BLOCK_MEETINGS[instruction.opcode], instruction, np.flatnonzero(here))
            return
        for warp in np.unique(arrived // WARP):
            first = warp * WARP
            lanes = np.flatnonzero(here[first : first + WARP]) + first
            mask = members(self.block, instruction, lanes)
            wanted = np.array([first + lane for lane in range(WARP) if mask >> lane & 1])
            if np.array_equal(lanes, wanted):
                self._go_on(WARP_MEETINGS[instruction.opcode], instruction, lanes)

    def _go_on(
        self,
        operation: Callable[[Block, Instruction, Array], None],
        instruction: Instruction,
        threads: Array,
    ) -> None:
        operation(self.block, instruction, threads)
        self.waiting[threads] = False
        self.counters[threads] += 1
