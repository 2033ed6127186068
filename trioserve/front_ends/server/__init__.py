"""The engine process's side: one session for each front end, over one engine.

Imported by ``front_ends.processes`` and ``front_ends.remote``.
"""
