"""What makes a run valid: the same work on every server, and all of it done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trioserve.load import Run
from trioserve.load.work import Conversation

__all__ = ["InvalidRun", "check", "check_agreement", "check_answers"]

# So much of the beginning of two answers is compared, and so many of the answers must agree.
_SAME_CHARACTERS = 12
_SAME_ANSWERS = 0.5


class InvalidRun(Exception):
    """What was measured isn't what was to be measured."""


def check(name: str, run: Run, prompt_tokens: int, output_tokens: int) -> None:
    """Every request was answered, and with exactly the work asked for.

    Raises:
        InvalidRun: one wasn't.
    """
    for record in run.records:
        if record.error:
            raise InvalidRun(f"{name}: a request failed: {record.error}")
        counted = (record.prompt_tokens, record.completion_tokens)
        if counted != (prompt_tokens, output_tokens):
            raise InvalidRun(
                f"{name} counts {counted[0]} tokens in and {counted[1]} out, "
                f"not {prompt_tokens} and {output_tokens}"
            )
        if not record.text:
            raise InvalidRun(f"{name}: an answer has no text")


def check_answers(name: str, run: Run, work: Sequence[Conversation]) -> None:
    """As :func:`check`, where each turn has a length of its own; prompts aren't counted.

    A client that leaves has no length to be checked, and an answer in a form ends by itself.

    Raises:
        InvalidRun: a request wasn't answered, or not at the length asked for.
    """
    for record in run.records:
        if record.error:
            raise InvalidRun(f"{name}: a request failed: {record.error}")
        turn = work[record.conversation].turns[record.turn]
        if record.cancelled or turn.form is not None:
            continue
        if record.completion_tokens != turn.max_tokens:
            raise InvalidRun(
                f"{name} counts {record.completion_tokens} tokens, not {turn.max_tokens}"
            )


def check_agreement(turns: Sequence[Mapping[str, Sequence[str]]], first: str) -> None:
    """Most answers of each server begin as those of the server ``first`` do.

    Greedy decoding of one model does, up to rounding. One answer may differ where two tokens are
    nearly as probable, so all turns of a round are taken together.

    Args:
        turns: for each turn, each server's answers to the same requests, in their order.
        first: whom the others are compared with.

    Raises:
        InvalidRun: they don't.
    """
    same: dict[str, list[bool]] = {}
    for answers in turns:
        for name, texts in answers.items():
            if name != first and first in answers:
                pairs = zip(answers[first], texts, strict=True)
                found = [a[:_SAME_CHARACTERS] == b[:_SAME_CHARACTERS] for a, b in pairs]
                same.setdefault(name, []).extend(found)
    for name, found in same.items():
        if sum(found) < _SAME_ANSWERS * len(found):
            raise InvalidRun(
                f"only {sum(found)} of {len(found)} answers begin alike on {first} and {name}"
            )
