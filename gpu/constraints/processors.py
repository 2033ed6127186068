"""Logits processors of the user's own: loading and calling them.

See :mod:`trioserve.logits_processors` for what they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs

from gpu.slots import PlanError, described
from trioserve.errors import ModelLoadError
from trioserve.logits_processors import LogitsProcessor, ProcessorContext, ProcessorRow

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NamedProcessor", "Processors", "load_processors"]

_METHODS = ("check", "open", "close", "apply")


@attrs.frozen
class NamedProcessor:
    """A processor and the ``module:Class`` that it comes from."""

    name: str
    processor: LogitsProcessor


def load_processors(names: Sequence[str], context: ProcessorContext) -> list[NamedProcessor]:
    """Import and make the processors ``module:Class``, in order.

    Raises:
        ModelLoadError: one can't be made, or lacks a method.
    """
    return [NamedProcessor(name, _load(name, context)) for name in names]


def _load(name: str, context: ProcessorContext) -> LogitsProcessor:
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ModelLoadError(f"--logits-processors {name}: write it as module:Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise what it likes
        raise ModelLoadError(
            f"--logits-processors {name}: the module can't be imported: {described(error)}; "
            "it must be installed, or in a folder that PYTHONPATH names"
        ) from error
    made = getattr(module, class_name, None)
    if not isinstance(made, type):
        raise ModelLoadError(f"--logits-processors {name}: {module_name} has no class {class_name}")
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise ModelLoadError(
            f"--logits-processors {name}: the class has no method {' and no '.join(missing)}"
        )
    try:
        processor = made(context)
    except Exception as error:
        raise ModelLoadError(
            f"--logits-processors {name}: it can't be made: {described(error)}"
        ) from error
    parameters = getattr(processor, "parameters", None)
    if not (
        isinstance(parameters, Collection)
        and not isinstance(parameters, str)
        and all(isinstance(parameter, str) for parameter in parameters)
    ):
        raise ModelLoadError(
            f"--logits-processors {name}: its parameters must be the names of those it takes, such "
            f'as parameters = ("word",); got {parameters!r}'
        )
    return cast(LogitsProcessor, processor)


class Processors:
    """The processors of a worker, and which of them see which slot."""

    def __init__(self, processors: Sequence[NamedProcessor] = ()) -> None:
        self._processors = list(processors)
        self._slots: list[set[int]] = [set() for _ in processors]

    def check(self, args: Mapping[str, Any]) -> bool:
        """Whether a processor is to see a request with these arguments. For any thread.

        Raises:
            ValueError: one of them says that an argument is wrong.
        """
        # All of them are asked, since each may have something against the arguments.
        answers = [bool(each.processor.check(args)) for each in self._processors]
        return any(answers)

    def not_taken(self, args: Mapping[str, Any]) -> list[str]:
        """The names among ``args`` that no processor takes."""
        taken = {name for each in self._processors for name in each.processor.parameters}
        return sorted(args.keys() - taken)

    def open(self, slot: int, args: Mapping[str, Any]) -> bool:
        """A sequence has got ``slot``; returns whether a processor sees it.

        Raises:
            PlanError: a processor failed; it names the slot.
        """
        self.close(slot)
        for each, slots in zip(self._processors, self._slots, strict=True):
            try:
                if each.processor.check(args):
                    each.processor.open(slot, args)
                    slots.add(slot)
            except Exception as error:
                raise _failure(each, error, slot) from error
        return any(slot in slots for slots in self._slots)

    def close(self, slot: int) -> None:
        """The sequence in ``slot`` has left; there may have been none.

        Raises:
            PlanError: a processor failed; it names the slot.
        """
        for each, slots in zip(self._processors, self._slots, strict=True):
            if slot in slots:
                slots.discard(slot)
                try:
                    each.processor.close(slot)
                except Exception as error:
                    raise _failure(each, error, slot) from error

    def apply(self, logits: Tensor, bias: Tensor, rows: Sequence[ProcessorRow]) -> None:
        """Have the processors add what they want to ``bias`` [R, V], one after the other.

        Raises:
            PlanError: a processor failed; it names the slot if it had only that one to look at.
        """
        for each, slots in zip(self._processors, self._slots, strict=True):
            seen = [row for row in rows if row.slot in slots]
            if not seen:
                continue
            try:
                each.processor.apply(logits, bias, seen)
            except Exception as error:
                raise _failure(each, error, seen[0].slot if len(seen) == 1 else -1) from error


def _failure(each: NamedProcessor, error: Exception, slot: int) -> PlanError:
    return PlanError(f"the logits processor {each.name} failed: {described(error)}", slot)
