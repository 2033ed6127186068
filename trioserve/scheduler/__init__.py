"""The scheduler: which sequences compute what in each step, over one worker.

``scheduler.py`` is the task, ``core.py`` the state machine; both are used by the engine alone.
Pooling, metrics and the live view read its statistics.
"""
