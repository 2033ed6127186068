"""Loads and calls logits processors; see :mod:`trioserve.protocol.logits_processors`."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs

from gpu._util.errors import summarize
from gpu.slots import PlanError
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.logits_processors import LogitsProcessor, ProcessorContext, ProcessorRow

if TYPE_CHECKING:
    from torch import Tensor

_METHODS = ("check", "open", "close", "apply")


@attrs.frozen(eq=False)
class NamedProcessor:
    """A processor and its ``module:Class``."""

    name: str
    processor: LogitsProcessor


def load_processors(names: Sequence[str], context: ProcessorContext) -> list[NamedProcessor]:
    """Import the classes ``module:Class`` and return an instance of each, in order.

    Raises:
        ModelLoadError: one can't be instantiated, or lacks a method.
    """
    return [load_processor(name, context) for name in names]


def load_processor(
    name: str, context: ProcessorContext, option: str = "--logits-processors"
) -> NamedProcessor:
    """Import a class and return an instance; ``option`` is named in errors.

    Raises:
        ModelLoadError: it can't be instantiated, or lacks a method.
    """
    try:
        return NamedProcessor(name, _load(name, context))
    except _NotLoaded as error:
        raise ModelLoadError(f"{option} {name}: {error}") from error


class _NotLoaded(Exception):
    """A processor can't be loaded."""


def _load(name: str, context: ProcessorContext) -> LogitsProcessor:
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise _NotLoaded("write it as module:Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module may raise anything
        raise _NotLoaded(
            f"the module can't be imported: {summarize(error)}; "
            "it must be installed, or in a folder that PYTHONPATH names"
        ) from error
    made = getattr(module, class_name, None)
    if not isinstance(made, type):
        raise _NotLoaded(f"{module_name} has no class {class_name}")
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise _NotLoaded(f"the class has no method {' and no '.join(missing)}")
    try:
        processor = made(context)
    except Exception as error:
        raise _NotLoaded(f"it can't be made: {summarize(error)}") from error
    parameters = getattr(processor, "parameters", None)
    if not (
        isinstance(parameters, Collection)
        and not isinstance(parameters, str)
        and all(isinstance(parameter, str) for parameter in parameters)
    ):
        raise _NotLoaded(
            f"its parameters must be the names of those it takes, such "
            f'as parameters = ("word",); got {parameters!r}'
        )
    return cast(LogitsProcessor, processor)


def _not_here(name: str) -> NamedProcessor:
    raise ModelLoadError(f"logits_processors {name}: this worker loads none for a request")


class Processors:
    """The processors of a worker, and the slots that each of them processes.

    Args:
        processors: those of the server, which may process any request.
        load: loads a processor that a request names; raises ModelLoadError.
    """

    def __init__(
        self,
        processors: Sequence[NamedProcessor] = (),
        load: Callable[[str], NamedProcessor] = _not_here,
    ) -> None:
        self._own = tuple(processors)
        self._load_named = load
        self._named = {each.name: each for each in self._own}
        self._slots: dict[NamedProcessor, set[int]] = {each: set() for each in self._own}
        self._loading = threading.Lock()

    def load(self, names: Sequence[str]) -> None:
        """Load the processors that a request names, unless they are loaded. Call it in any thread.

        Raises:
            ModelLoadError: one can't be loaded.
        """
        with self._loading:
            for name in names:
                if name not in self._named:
                    loaded = self._load_named(name)
                    # A copy, since the thread that runs steps may be iterating over the old dict.
                    self._slots = {**self._slots, loaded: set()}
                    self._named[name] = loaded

    def check(self, args: Mapping[str, Any], names: Sequence[str] = ()) -> bool:
        """Return whether any processor processes a request with these arguments.

        Call it in any thread.

        Raises:
            ValueError: a processor refuses an argument, or one that the request names doesn't
                process it.
        """
        # Every processor checks the arguments, since each may refuse one.
        answers = [bool(each.processor.check(args)) for each in self._own]
        for name in names:
            if not self._named[name].processor.check(args):
                raise ValueError(f"the logits processor {name} takes no part with these extra_args")
        return any(answers) or bool(names)

    def not_taken(self, args: Mapping[str, Any], names: Sequence[str] = ()) -> list[str]:
        """Return the names among ``args`` that no processor takes."""
        asked = (*self._own, *(self._named[name] for name in names))
        taken = {name for each in asked for name in each.processor.parameters}
        return sorted(args.keys() - taken)

    def open(self, slot: int, args: Mapping[str, Any], names: Sequence[str] = ()) -> bool:
        """Open ``slot`` in the processors for it; return whether there are any.

        Raises:
            PlanError: a processor failed, or can't be loaded; it names the slot.
        """
        self.close(slot)
        try:
            self.load(names)  # A former worker may have checked this request.
        except ModelLoadError as error:
            raise PlanError(str(error), slot) from error
        for each in dict.fromkeys((*self._own, *(self._named[name] for name in names))):
            try:
                if each.processor.check(args):
                    each.processor.open(slot, args)
                    self._slots[each].add(slot)
            except Exception as error:
                raise _failure(each, error, slot) from error
        return any(slot in slots for slots in self._slots.values())

    def close(self, slot: int) -> None:
        """Close ``slot`` in the processors that have it.

        Raises:
            PlanError: a processor failed; it names the slot.
        """
        for each, slots in self._slots.items():
            if slot in slots:
                slots.discard(slot)
                try:
                    each.processor.close(slot)
                except Exception as error:
                    raise _failure(each, error, slot) from error

    def apply(self, logits: Tensor, bias: Tensor, rows: Sequence[ProcessorRow]) -> None:
        """Call the processors one after the other; each adds to ``bias`` [R, V].

        Raises:
            PlanError: a processor failed; it names the slot if that processor had only one.
        """
        for each, slots in self._slots.items():
            seen = [row for row in rows if row.slot in slots]
            if not seen:
                continue
            try:
                each.processor.apply(logits, bias, seen)
            except Exception as error:
                raise _failure(each, error, seen[0].slot if len(seen) == 1 else -1) from error


def _failure(each: NamedProcessor, error: Exception, slot: int) -> PlanError:
    return PlanError(f"the logits processor {each.name} failed: {summarize(error)}", slot)
