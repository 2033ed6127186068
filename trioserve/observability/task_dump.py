"""Every task of this trio program with its stack, as text, to find out why nothing moves.

A dump is a tree. A task's stack is printed with the outermost call first, as in a traceback, and
its nurseries below it, one level in. Equal tasks of one nursery, with equal stacks and children,
are printed once, with their number. A task is one of:

``running``    the task that requested the dump, or that a signal interrupted
``ready``      scheduled to run after other tasks
``waiting``    for the call in the last line of its stack
``cancelled``  as ``waiting``, with a cancellation that it hasn't left yet

Below the tree are the stacks of the process's other threads, equal ones once. Parts of the program
may add lines to the top of every dump by :func:`reporting`, and have other processes log theirs.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

import attrs
import trio

MAX_STACKS = 10_000
"""The most tasks with stacks; the rest are only counted."""
MAX_LINES = 4_000
MAX_COLUMNS = 200
_MAX_INDENT = 40
_TRIO_FOLDER = str(Path(trio.__file__).parent)

Call = tuple[str, int, str]
"""A file, a line in it, and the function there."""


@attrs.frozen(eq=False)
class _Part:
    """A part of the program that adds lines to a dump."""

    report: Callable[[], str]
    ask: Callable[[], None]


_parts: trio.lowlevel.RunVar[tuple[_Part, ...]] = trio.lowlevel.RunVar(
    "trioserve.task_dump.parts", ()
)


@contextlib.contextmanager
def reporting(
    report: Callable[[], str], *, ask: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Have dumps in this trio program begin with the result of ``report``, during the block.

    :func:`ask_others` calls ``ask``.
    """
    part = _Part(report, ask)
    _parts.set((*_parts.get(), part))
    try:
        yield
    finally:
        _parts.set(tuple(each for each in _parts.get() if each is not part))


def ask_others() -> None:
    """Have the child processes of this program log their tasks.

    This is as safe as :func:`dump_tasks`. Outside of trio it does nothing.
    """
    with contextlib.suppress(RuntimeError):
        for part in _parts.get():
            with contextlib.suppress(OSError):  # the process may have ended just now
                part.ask()


def dump_tasks() -> str:
    """Return the tree of all tasks, ending in a line break.

    Call this in trio's thread: in any task, or in a signal handler that interrupted one. It only
    reads, so it is safe at any time; 10,000 tasks take a fraction of a second.

    Raises:
        RuntimeError: trio doesn't run in this thread.
    """
    root = trio.lowlevel.current_root_task()
    lines = [line for part in _parts.get() for line in _safely(part.report).splitlines()]
    if root is not None:
        nodes, num_left_out = _collect(root)
        _fold(nodes)
        shown = f", {len(nodes)} of them shown" if num_left_out else ""
        lines += [f"{len(nodes) + num_left_out} trio tasks{shown}:", *_render(nodes[0])]
    lines += _threads()
    return "\n".join(line[:MAX_COLUMNS] for line in lines) + "\n"


def _safely(report: Callable[[], str]) -> str:
    try:
        return report()
    except Exception as error:  # the tasks are needed most when other parts have failed
        return f"a report failed: {error!r}"


# ---- the tree


@attrs.define(eq=False)
class _Node:
    """A task at this moment. ``shape`` is equal for tasks that print alike."""

    name: str
    state: str
    deadline: float
    """Seconds until the nearest deadline around the task's wait."""
    stack: tuple[Call, ...]
    nests: list[_Nest] = attrs.field(factory=list)
    shape: int = 0


@attrs.define(eq=False)
class _Nest:
    """A nursery and its tasks; ``groups`` has equal tasks together."""

    state: str
    children: list[_Node] = attrs.field(factory=list)
    groups: list[list[_Node]] = attrs.field(factory=list)


def _collect(root: trio.lowlevel.Task) -> tuple[list[_Node], int]:
    """Return every task, parents first, and the number of tasks beyond the limit."""
    nodes: list[_Node] = []
    num_left_out = 0
    left: list[tuple[trio.lowlevel.Task, _Nest | None]] = [(root, None)]
    while left:
        task, nest = left.pop()
        shown = len(nodes) < MAX_STACKS
        if shown:
            node = _look_at(task)
            nodes.append(node)
            if nest is not None:
                nest.children.append(node)
        else:
            num_left_out += 1
        for nursery in reversed(task.child_nurseries):
            own = _Nest(_state_of_nursery(nursery))
            if shown:
                node.nests.insert(0, own)
            children = sorted(nursery.child_tasks, key=order_of, reverse=True)
            left += [(child, own) for child in children]
    return nodes, num_left_out


def order_of(task: trio.lowlevel.Task) -> int:
    """Return a number that is larger for tasks that were started later."""
    number: int = getattr(task, "_counter", 0)
    return number


def _look_at(task: trio.lowlevel.Task) -> _Node:
    state = state_of(task)
    stack = _running_stack(task) if state == "running" else _waiting_stack(task)
    return _Node(task.name, state, _seconds_left(task), stack)


def state_of(task: trio.lowlevel.Task) -> str:
    """Return one of the states that the module's text explains."""
    if task is _current_task():
        return "running"
    if getattr(getattr(task, "_cancel_status", None), "effectively_cancelled", False):
        return "cancelled"
    return "ready" if getattr(task, "_next_send_fn", None) is not None else "waiting"


def _seconds_left(task: trio.lowlevel.Task) -> float:
    status = getattr(task, "_cancel_status", None)
    return math.inf if status is None else status.effective_deadline() - trio.current_time()


def _current_task() -> trio.lowlevel.Task | None:
    try:
        return trio.lowlevel.current_task()
    except RuntimeError:  # a signal interrupted trio between two tasks
        return None


def _waiting_stack(task: trio.lowlevel.Task) -> tuple[Call, ...]:
    calls: list[Call] = []
    try:
        for frame, line in task.iter_await_frames():
            code = frame.f_code
            calls.append((code.co_filename, line, code.co_qualname))
    except (AttributeError, TypeError):
        # A coroutine that isn't Python's own, or that has just ended, has no further frames.
        pass
    # The dump shows the call into trio, but not trio's inner calls.
    while len(calls) > 1 and _is_trios(calls[-1]) and _is_trios(calls[-2]):
        calls.pop()
    return tuple(calls)


def _is_trios(call: Call) -> bool:
    return call[0].startswith(_TRIO_FOLDER)


def _running_stack(task: trio.lowlevel.Task) -> tuple[Call, ...]:
    """Return the calls from the task's function down to the caller of :func:`dump_tasks`."""
    calls = _thread_stack(sys._getframe(), getattr(task.coro, "cr_frame", None))
    return tuple(call for call in calls if call[0] != __file__)


def _thread_stack(frame: FrameType | None, outermost: FrameType | None = None) -> list[Call]:
    """Return ``frame`` and the calls around it, up to ``outermost`` if that is among them."""
    calls: list[Call] = []
    while frame is not None:
        calls.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        if frame is outermost:
            break
        frame = frame.f_back
    return calls[::-1]


def _state_of_nursery(nursery: trio.Nursery) -> str:
    scope = nursery.cancel_scope
    words = ["cancelled"] if scope.cancel_called else []
    if scope.shield:
        words.append("shielded")
    return ", ".join(words)


# ---- equal tasks


def _fold(nodes: list[_Node]) -> None:
    """Set the shape of every node, and group the equal nodes of each nursery."""
    shapes: dict[object, int] = {}
    for node in reversed(nodes):  # children before their parents
        for nest in node.nests:
            groups: dict[int, list[_Node]] = {}
            for child in nest.children:
                groups.setdefault(child.shape, []).append(child)
            nest.groups = list(groups.values())
        nests = tuple(
            (nest.state, tuple((group[0].shape, len(group)) for group in nest.groups))
            for nest in node.nests
        )
        looks = (node.name, node.state, node.deadline < math.inf, node.stack, nests)
        node.shape = shapes.setdefault(looks, len(shapes))


# ---- the text


def _render(root: _Node) -> list[str]:
    lines: list[str] = []
    left: list[tuple[int, list[_Node] | str]] = [(0, [root])]
    while left:
        depth, group = left.pop()
        if len(lines) >= MAX_LINES:
            lines.append("... and more, which is left out")
            break
        indent = "  " * min(depth, _MAX_INDENT)
        if isinstance(group, str):
            lines.append(indent + group)
            continue
        node = group[0]
        lines += [indent + line for line in _task_lines(group)]
        for nest in reversed([nest for nest in node.nests if nest.groups]):
            left += [(depth + 2, each) for each in reversed(nest.groups)]
            left.append((depth + 1, f"nursery ({nest.state})" if nest.state else "nursery"))
    return lines


def _task_lines(group: list[_Node]) -> list[str]:
    node = group[0]
    title = f"{node.name}: {node.state}"
    deadline = min(each.deadline for each in group)
    if 0 < deadline < math.inf:
        title += f", deadline in {deadline:.1f} s"
    if len(group) > 1:
        title = f"{len(group)} x {title}"
    lines = [title]
    return lines + _stack_lines(node.stack)


def _threads() -> list[str]:
    """Return the other threads of this process as text, those with equal stacks together."""
    groups: dict[tuple[Call, ...], list[int]] = {}
    for ident, frame in sorted(sys._current_frames().items()):
        if ident != threading.get_ident():
            groups.setdefault(tuple(_thread_stack(frame)), []).append(ident)
    lines: list[str] = []
    for stack, idents in groups.items():
        if len(lines) < MAX_LINES:
            number = f"{len(idents)} x " if len(idents) > 1 else ""
            lines += [f"{number}thread {', '.join(map(str, idents))}:", *_stack_lines(stack)]
    return lines


def _stack_lines(stack: Iterable[Call]) -> list[str]:
    lines: list[str] = []
    for file, line, function in stack:
        lines.append(f"    {_short(file)}:{line} in {function}")
        if source := linecache.getline(file, line).strip():
            lines.append(f"        {source}")
    return lines


def _short(file: str) -> str:
    """Return ``file`` relative to the folder that Python imports it from."""
    folders = [folder for folder in sys.path if folder and file.startswith(f"{folder}/")]
    return file[max(map(len, folders), default=-1) + 1 :]
