"""The front end's side: the engine's interfaces, answered by the engine process.

Imported by the programs of front ends: ``client/main`` and ``front_ends.remote``.
"""
