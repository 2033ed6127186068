"""Pooling: embeddings, scores and labels of texts.

Reading order: ``columns`` (texts as they travel), ``core`` (the choice of the next call's texts),
``batcher`` (the task that calls the worker), ``open_requests`` (requests that can be aborted),
``inputs`` (checks of arguments), ``results``, ``requests`` (the work), and ``engine`` (the engine's
methods).

Imported by ``engine``, ``http.api``, ``front_ends`` and ``testing``.
"""
