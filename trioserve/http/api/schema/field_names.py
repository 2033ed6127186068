"""One endpoint's request told in the fields of another, and errors told in its own again."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import attrs

from trioserve.http.api.generations import PromptJob
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.sampling import SamplingParams


class FieldNames:
    """What an endpoint calls the fields of a chat request, which it makes of its own.

    Args:
        names: pairs of a field of a chat request, as a regular expression that matches nothing
            within a longer name, and its own, which may refer to groups. The first that matches
            counts.
    """

    def __init__(self, *names: tuple[str, str]) -> None:
        self._names = [
            (re.compile(rf"(?<![\w.])(?:{pattern})(?!\w)"), own) for pattern, own in names
        ]
        # What the engine says of a request speaks of these; the chat template's errors of messages.
        engine_names = (*attrs.fields_dict(SamplingParams), "messages")
        self._engine_names = {name: self.name(name) for name in engine_names}

    def name(self, theirs: str) -> str:
        """Its own name of a field, which is the same where there is no other."""
        for pattern, own in self._names:
            if pattern.match(theirs):
                return pattern.sub(own, theirs, count=1)
        return theirs

    def error(self, error: InvalidRequest) -> InvalidRequest:
        """``error`` about its own fields."""
        message = str(error)
        for pattern, own in self._names:
            message = pattern.sub(own, message, count=1)
        param = None if error.param is None else self.name(error.param)
        return InvalidRequest(message, param=param, code=error.code)

    def job(self, job: PromptJob) -> PromptJob:
        """``job``, whose later errors are about its own fields."""
        renames = {name: self.name(theirs) for name, theirs in job.renames.items()}
        return attrs.evolve(job, renames={**self._engine_names, **renames})

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """A block whose errors are about its own fields."""
        try:
            yield
        except InvalidRequest as error:
            raise self.error(error) from error
