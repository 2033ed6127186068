"""The adapters that an engine offers, by name: LoRA adapters and prompt adapters.

Every load has a number of its own, so KV of one adapter is never taken for that of a later adapter
with the same name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from trioserve.protocol.errors import AdapterNotFound
from trioserve.requests.embedded import PREFIX, EmbeddedSpan

NO_ADAPTER = 0
"""The number that stands for no adapter."""


@attrs.frozen(kw_only=True)
class Adapter:
    """One adapter that requests may name."""

    number: int
    name: str
    path: str
    """The absolute path of its folder."""
    num_virtual_tokens: int = 0
    """Number of virtual tokens that it puts in front of a prompt; 0 for a LoRA adapter."""
    spans: tuple[EmbeddedSpan, ...] = attrs.field(default=(), eq=False, repr=False)
    """Embeddings of these tokens, or keys and values; none in the process of a front end."""

    @property
    def has_prefix(self) -> bool:
        """True if it has keys and values."""
        return any(span.kind == PREFIX for span in self.spans)


THE_MODEL = Adapter(number=NO_ADAPTER, name="", path="")
"""The stand-in for an adapter, of requests that name none."""


@attrs.define(eq=False)
class Catalogue:
    """The adapters that requests may name at the moment, in the order in which they came."""

    _by_name: dict[str, Adapter] = attrs.field(init=False, factory=dict)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._by_name.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def find(self, name: str) -> Adapter:
        """Return the adapter of that name.

        Raises:
            AdapterNotFound: there is none.
        """
        if name not in self._by_name:
            raise AdapterNotFound(f"no adapter {name!r} is loaded")
        return self._by_name[name]

    def add(self, adapter: Adapter) -> None:
        """Let requests name ``adapter``."""
        self._by_name[adapter.name] = adapter

    def remove(self, name: str) -> Adapter:
        """Let no request name it any more; raises as :meth:`find`."""
        adapter = self.find(name)
        del self._by_name[name]
        return adapter

    def replace(self, adapters: Sequence[Adapter]) -> None:
        """Let requests name ``adapters`` and no others."""
        self._by_name = {adapter.name: adapter for adapter in adapters}
