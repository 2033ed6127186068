"""The deadline of a request, and the error for its caller."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import attrs
import trio

from trioserve.config import EngineConfig
from trioserve.protocol.errors import DeadlineExceeded


@attrs.frozen
class Deadline:
    """A moment ``at`` on trio's clock, which may be infinity, and its reason."""

    at: float
    _why: str = ""

    @classmethod
    def of(cls, timeout: float | None, arrived: float | None, config: EngineConfig) -> Deadline:
        """Return the deadline of a request.

        Args:
            timeout: the request's own seconds, which override the default.
            arrived: the moment on trio's clock from which they count; None for now.
            config: has the default.
        """
        start = trio.current_time() if arrived is None else arrived
        if timeout is not None:
            return cls(start + timeout, f"the request's timeout of {timeout:g} s ran out")
        default = config.default_timeout
        if default is None:
            return cls(math.inf)
        return cls(
            start + default,
            f"the request took longer than {default:g} s (--default-timeout), and named no "
            "timeout of its own",
        )

    @contextlib.contextmanager
    def enforced(self) -> Iterator[None]:
        """Cancel the block when the moment has come.

        Raises:
            DeadlineExceeded: it was cancelled for this.
        """
        with trio.CancelScope(deadline=self.at) as scope:
            yield
        if scope.cancelled_caught:
            raise DeadlineExceeded(self._why)
