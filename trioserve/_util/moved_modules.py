"""Old names of public modules, kept until 1.0 with a DeprecationWarning."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import attrs


@attrs.define
class _Alias(Loader):
    """Loader of an old name: the module of the new one, which keeps its own spec."""

    _module: ModuleType
    _spec: ModuleSpec | None = attrs.field(init=False)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of the new name, under both names."""
        self._spec = self._module.__spec__
        sys.modules[spec.name] = self._module
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what the import system has set: the module was executed under its new name."""
        module.__spec__ = self._spec


@attrs.frozen
class MovedModules(MetaPathFinder):
    """Finder of modules by names that they, or their packages, had before.

    Args:
        new_names: the new name of each module or package, by the old one.
    """

    new_names: Mapping[str, str]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return an alias's spec, with a warning that names the new module."""
        old = next((old for old in self.new_names if f"{fullname}.".startswith(f"{old}.")), None)
        if old is None:
            return None
        new_name = self.new_names[old] + fullname.removeprefix(old)
        warnings.warn(
            f"{fullname} is {new_name} now; the old name ends with 1.0",
            DeprecationWarning,
            stacklevel=2,
        )
        module = importlib.import_module(new_name)
        return importlib.util.spec_from_loader(fullname, _Alias(module))
