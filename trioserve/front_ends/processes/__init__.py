"""The front-end processes: started together, watched, replaced, drained and ended.

Imported by ``front_ends.serving``.
"""
