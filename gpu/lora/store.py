"""The adapters that a worker holds, each in the form in which its device computes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gpu.lora.reading import LoraWeights, read_adapter
from trioserve.model_files import ModelConfig
from trioserve.protocol.errors import ModelLoadError

T = TypeVar("T")


class AdapterStore(Mapping[int, T]):
    """Adapters by number. A new load has a new number, so that what is one's is never another's.

    :meth:`load` may be called by another thread than the one that computes: an adapter is there,
    whole, from one moment to the next.

    Args:
        config: of the model.
        max_rank: the largest rank that is served; 0 if no adapters are.
        pack: makes the device's form of what was read.
    """

    def __init__(
        self, config: ModelConfig, max_rank: int, pack: Callable[[LoraWeights], T]
    ) -> None:
        self._config = config
        self.max_rank = max_rank
        self._pack = pack
        self._adapters: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._adapters)

    def __iter__(self) -> Iterator[int]:
        return iter(self._adapters)

    def __getitem__(self, number: int) -> T:
        return self._adapters[number]

    def load(self, arguments: Any) -> dict[str, Any]:
        """Return the call ``load_adapter``: read, check and pack one.

        Args:
            arguments: ``number`` of the adapter, ``path`` of its folder, and the ``checksum`` that
                it had when it was loaded before, empty for the first time.

        Returns:
            its ``checksum`` and ``rank``, or the ``error`` that a person can act on, with
            ``missing`` where there is no such folder.
        """
        number, path, checksum = (arguments[name] for name in ("number", "path", "checksum"))
        try:
            adapter = read_adapter(Path(path), self._config, self.max_rank)
            if checksum and adapter.checksum != checksum:
                raise ModelLoadError(
                    f"{path} holds another adapter than the one that was loaded from there: "
                    "load it anew"
                )
        except ModelLoadError as error:
            return {"error": str(error), "missing": not Path(path).exists()}
        self.put(number, adapter)
        return {"checksum": adapter.checksum, "rank": adapter.rank}

    def put(self, number: int, adapter: LoraWeights) -> None:
        """Hold what was read as number ``number``."""
        self._adapters[number] = self._pack(adapter)

    def unload(self, number: int) -> None:
        """Unload an adapter that no sequence uses any more: the call ``unload_adapter``."""
        del self._adapters[number]
