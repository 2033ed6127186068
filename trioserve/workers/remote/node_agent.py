"""The agent of a node behind the first one: it runs the node's process, over again."""

from __future__ import annotations

import contextlib
import subprocess

import attrs
import msgspec
import trio

from trioserve._util.child_process import end_child
from trioserve.observability.logs import get_logger
from trioserve.protocol.node_setup import NodeSetup
from trioserve.workers.command import node_command
from trioserve.workers.supervisor import delay_after

_FIRST_DELAY = 0.5
_MAX_DELAY = 5.0
"""Most seconds between two attempts to join."""
_SERVED = 30.0
"""Seconds after which a process counts as one that has served."""
_log = get_logger("trioserve.worker")


@attrs.define(eq=False, kw_only=True)
class NodeAgent:
    """The agent of one node.

    Args:
        setup: The setup of its process.
        leaving: Set by :meth:`leave`, or from outside to the same effect.
    """

    setup: NodeSetup
    _leaving: trio.Event = attrs.field(factory=trio.Event)

    def leave(self) -> None:
        """Have :meth:`run` end, and return. The worker is lost, and its requests move."""
        self._leaving.set()

    async def run(self) -> None:
        """Run the process until :meth:`leave`, again whenever it ends: with node 0, or a rank."""
        attempts = 0
        while not self._leaving.is_set():
            began = trio.current_time()
            await self._run_process()
            attempts = 0 if trio.current_time() - began > _SERVED else attempts + 1
            with trio.move_on_after(delay_after(attempts, _FIRST_DELAY, _MAX_DELAY)):
                await self._leaving.wait()

    async def _run_process(self) -> None:
        command, environment = node_command()
        process = await trio.lowlevel.open_process(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal must reach only this process.
        )
        assert process.stdin is not None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_at_leaving, nursery.cancel_scope)
                with contextlib.suppress(trio.BrokenResourceError):  # It has ended.
                    await process.stdin.send_all(msgspec.json.encode(self.setup) + b"\n")
                status = await process.wait()
                _log.info("the node's ranks have ended", status=status)
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await end_child(process, _log, "node")

    async def _cancel_at_leaving(self, scope: trio.CancelScope) -> None:
        await self._leaving.wait()
        scope.cancel()
