"""The engine in a thread of its own: ``trioserve/offline``."""
