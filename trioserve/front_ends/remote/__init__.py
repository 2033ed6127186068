"""Front ends on other hosts: the engine's side of them, and their own program.

They join at the port of workers (:mod:`trioserve.workers.remote`), over the same kind of link.

Imported by ``front_ends.processes`` and ``cli``.
"""
