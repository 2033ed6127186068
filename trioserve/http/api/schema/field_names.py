"""Translation of fields between two endpoints, and of errors back to the client's own names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import attrs

from trioserve.http.api.jobs import PromptJob
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.sampling import SamplingParams


class FieldNames:
    """An endpoint's names of the fields of the chat request that it makes of its own.

    Args:
        names: pairs of a field of a chat request and the endpoint's own name. The first is a
            regular expression that matches nothing within a longer name; the second may refer to
            groups. The first matching pair counts.
    """

    def __init__(self, *names: tuple[str, str]) -> None:
        self._names = [
            (re.compile(rf"(?<![\w.])(?:{pattern})(?!\w)"), own) for pattern, own in names
        ]
        # The engine's errors use these names; the chat template's errors speak of messages.
        engine_names = (*attrs.fields_dict(SamplingParams), "messages")
        self._engine_names = {name: self.name(name) for name in engine_names}

    def name(self, theirs: str) -> str:
        """Return its own name of a field, which is the same if the table has no other."""
        for pattern, own in self._names:
            if pattern.match(theirs):
                return pattern.sub(own, theirs, count=1)
        return theirs

    def error(self, error: InvalidRequest) -> InvalidRequest:
        """Return ``error`` with its own names of fields."""
        message = str(error)
        for pattern, own in self._names:
            message = pattern.sub(own, message, count=1)
        param = None if error.param is None else self.name(error.param)
        return InvalidRequest(message, param=param, code=error.code)

    def job(self, job: PromptJob) -> PromptJob:
        """Return ``job`` with later errors in its own names of fields."""
        renames = {name: self.name(theirs) for name, theirs in job.renames.items()}
        return attrs.evolve(job, renames={**self._engine_names, **renames})

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Translate the errors of a block to its own names of fields."""
        try:
            yield
        except InvalidRequest as error:
            raise self.error(error) from error
