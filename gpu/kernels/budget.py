"""The budget of every kernel: ``budget.toml`` against what ptxas reports.

The file has two parts. People write the first: which instructions a kernel must have, and which
variants may go without a promise, with the reason. ``python -m gpu.kernels --write-budget`` writes
the second, the measured costs, for people to review as a difference. With them goes a digest of
what they were measured from, so that a changed kernel is noticed without compiling all variants.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from gpu.kernels import FOLDER, KernelSource
from gpu.kernels.nvrtc import KernelUsage
from gpu.kernels.sass import Instructions
from gpu.kernels.targets import TARGETS

BUDGET = FOLDER / "budget.toml"

COMMON_HEAD_DIMS = {"64", "128"}
"""Head sizes of common models: their kernels are never excused."""

_COSTS = "[costs]"
_COSTS_START = f"""\
# ---- Written by `python -m gpu.kernels --write-budget`; review the difference. -------------------
# In the order of the targets: registers of a thread; local memory of a thread in bytes (spilled
# registers and arrays indexed at run time), where it isn't 0 everywhere. Then the shared memory of
# a block in bytes, static and dynamic. Behind them, what each kernel was measured from.

{_COSTS}
"""


@attrs.frozen(kw_only=True)
class MeasuredKernel:
    """One kernel as built for one target."""

    source: KernelSource
    target: str
    usage: KernelUsage
    instructions: Instructions | None = None
    """None where none are asked for."""

    @property
    def shared(self) -> int:
        """Static and dynamic bytes of a block."""
        return self.usage.static_shared + self.source.shared_bytes

    @property
    def local(self) -> int:
        """Bytes of local memory of a thread: spilled registers and arrays indexed at run time."""
        return self.usage.stack or self.usage.spills

    @property
    def blocks(self) -> int:
        """Blocks that run side by side on a multiprocessor; 0: it can't run there."""
        return TARGETS[self.target].blocks_per_multiprocessor(
            self.source.num_threads, self.usage.registers, self.shared
        )


@attrs.frozen(kw_only=True)
class Cost:
    """The largest cost allowed for one variant."""

    registers: dict[str, int]
    """Registers of a thread, by target."""
    local: dict[str, int]
    """Bytes of a thread, by target."""
    shared: int
    """Bytes of a block."""


@attrs.frozen(kw_only=True)
class Excuse:
    """Variants that may break a promise on some targets.

    ``promise`` is ``"local"``, for no local memory, or ``"fits"``, for at least one block on a
    multiprocessor. ``defines`` are words of the variant's title, such as ``HEAD_DIM=256``.
    """

    kernel: str
    defines: tuple[str, ...]
    promise: str
    targets: tuple[str, ...]
    reason: str

    def covers(self, source: KernelSource) -> bool:
        """Return whether this is about ``source``."""
        words = {f"{name}={value}" for name, value in source.defines}
        return source.name == self.kernel and words >= set(self.defines)


@attrs.frozen
class BudgetViolation:
    """One thing that isn't as the budget says."""

    title: str
    """Title of the kernel."""
    target: str
    """Empty where it isn't about one target."""
    problem: str

    def __str__(self) -> str:
        return f"{self.title}, {self.target}: {self.problem}".replace(", :", ":")


@attrs.frozen(kw_only=True)
class Budget:
    """The whole file."""

    instructions: dict[str, tuple[str, ...]]
    """By kernel, what its code must have; the patterns are those of Instructions.like."""
    excuses: tuple[Excuse, ...]
    compiler: str
    costs: dict[str, Cost]
    """By title."""
    digests: dict[str, str]
    """By kernel, what its costs were measured from; see :func:`gpu.kernels.catalogue.digests`."""

    @classmethod
    def read(cls, text: str) -> Budget:
        """From the text of ``budget.toml``.

        Raises:
            ValueError: it is no such file.
        """
        data = tomllib.loads(text)
        measured: dict[str, Any] = data.get("costs", {})
        targets = measured.get("targets", [])
        costs = {
            _title(kernel, choices): Cost(
                registers=dict(zip(targets, line["registers"], strict=True)),
                local=dict(zip(targets, line.get("local", [0] * len(targets)), strict=True)),
                shared=line["shared"],
            )
            for kernel, variants in measured.items()
            if isinstance(variants, dict)
            for choices, line in variants.items()
        }
        return cls(
            instructions={name: tuple(wanted) for name, wanted in data["instructions"].items()},
            excuses=tuple(
                Excuse(
                    kernel=each["kernel"],
                    defines=tuple(each["defines"]),
                    promise=each["promise"],
                    targets=tuple(each["targets"]),
                    reason=each["reason"],
                )
                for each in data.get("excuse", [])
            ),
            compiler=measured.get("compiler", ""),
            costs=costs,
            digests=data.get("digests", {}),
        )

    def violations(self, each: MeasuredKernel) -> Iterator[BudgetViolation]:
        """Everything in which ``each`` breaks the budget."""
        for problem in (*self._broken_promises(each), *self._overspent(each)):
            yield BudgetViolation(each.source.title, each.target, problem)

    def _broken_promises(self, each: MeasuredKernel) -> Iterator[str]:
        if each.local and not self._excused(each, "local"):
            yield f"{each.local} bytes of local memory: registers are spilled, or an array is there"
        if each.blocks == 0 and not self._excused(each, "fits"):
            limit = TARGETS[each.target].shared_per_block
            yield f"doesn't fit a multiprocessor: {each.shared} bytes shared of {limit}"
        for wanted in self.instructions.get(each.source.name, ()):
            if each.instructions is not None and not each.instructions.like(wanted):
                yield f"has no {wanted} instruction"

    def _overspent(self, each: MeasuredKernel) -> Iterator[str]:
        cost = self.costs.get(each.source.title)
        if cost is None or each.target not in cost.registers:
            yield "not in the budget; --write-budget adds it"
            return
        for what, now, most in (
            ("registers", each.usage.registers, cost.registers[each.target]),
            ("bytes of local memory", each.local, cost.local[each.target]),
            ("bytes of shared memory", each.shared, cost.shared),
        ):
            if now > most:
                yield f"{now} {what}, the budget says {most}"

    def stale(self, sources: Iterable[KernelSource]) -> Iterator[BudgetViolation]:
        """Yield entries for kernels that are not among ``sources``, and excuses of no use."""
        known = {source.title: source for source in sources}
        names = {source.name for source in known.values()}
        for title in sorted(self.costs.keys() - known.keys()):
            yield BudgetViolation(title, "", "in the budget, but no kernel")
        for name in sorted(self.instructions.keys() - names):
            yield BudgetViolation(name, "", "must have instructions, but is no kernel")
        for excuse in self.excuses:
            covered = [source for source in known.values() if excuse.covers(source)]
            where = " ".join((excuse.kernel, *excuse.defines))
            if not covered:
                yield BudgetViolation(where, "", "excused, but no kernel")
            if any(_is_common(source) for source in covered):
                yield BudgetViolation(where, "", "sizes that common models use can't be excused")

    def outdated(self, digests: Mapping[str, str]) -> Iterator[BudgetViolation]:
        """Yield the kernels, by their present ``digests``, that have changed since measured."""
        for name, now in digests.items():
            if self.digests.get(name) != now:
                yield BudgetViolation(
                    name, "", "has changed since it was measured; see --write-budget"
                )

    def _excused(self, each: MeasuredKernel, promise: str) -> bool:
        return any(
            excuse.promise == promise
            and each.target in excuse.targets
            and excuse.covers(each.source)
            for excuse in self.excuses
        )


def replace_costs(
    text: str,
    measured: Sequence[MeasuredKernel],
    digests: Mapping[str, str],
    compiler: str,
    *,
    all_of: bool,
) -> str:
    """``text`` of a budget with the costs of ``measured`` kernels, all variants on every target.

    ``digests`` are those of their sources. ``all_of`` says that there are no other kernels; else
    the costs of others stay.
    """
    again = {each.source.name for each in measured}
    budget = Budget.read(text)
    before = {} if all_of else budget.costs
    digests = dict(digests) if all_of else {**budget.digests, **digests}
    costs = {title: cost for title, cost in before.items() if title.partition("<")[0] not in again}
    found: dict[str, list[MeasuredKernel]] = {}
    for each in measured:
        found.setdefault(each.source.title, []).append(each)
    for title, rows in found.items():
        costs[title] = Cost(
            registers={row.target: row.usage.registers for row in rows},
            local={row.target: row.local for row in rows},
            shared=max(row.shared for row in rows),
        )
    by_hand = text.partition(_COSTS_START.partition("\n")[0])[0].rstrip()
    lines = [by_hand, "", _COSTS_START.rstrip(), f'compiler = "{compiler}"']
    lines.append(f"targets = [{', '.join(f'{chr(34)}{name}{chr(34)}' for name in TARGETS)}]")
    kernel = ""
    for title in sorted(costs):
        name, _, choices = title.partition("<")
        if name != kernel:
            lines += ["", f"[costs.{name}]"]
            kernel = name
        lines.append(f'"{choices.removesuffix(">")}" = {_as_line(costs[title])}')
    lines += ["", "[digests]", *(f'{name} = "{digests[name]}"' for name in sorted(digests))]
    return "\n".join(lines) + "\n"


def _as_line(cost: Cost) -> str:
    fields = [f"registers = {[cost.registers[name] for name in TARGETS]}"]
    if any(cost.local.values()):
        fields.append(f"local = {[cost.local[name] for name in TARGETS]}")
    return f"{{ {', '.join([*fields, f'shared = {cost.shared}'])} }}"


def _title(kernel: str, choices: str) -> str:
    return f"{kernel}<{choices}>" if choices else kernel


def _is_common(source: KernelSource) -> bool:
    head_dims = {str(value) for name, value in source.defines if name == "HEAD_DIM"}
    return not head_dims or not head_dims.isdisjoint(COMMON_HEAD_DIMS)
