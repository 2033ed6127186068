"""The front end's side: the engine's interfaces, answered by the engine process.

Imported by the front-end program alone.
"""
