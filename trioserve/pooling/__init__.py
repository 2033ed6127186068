"""Texts to embeddings, scores and labels: whatever a model says of a text as a whole.

Reading order: ``columns`` (texts as they travel), ``core`` (which of them go into the next call),
``batcher`` (the task that calls the worker), ``open_requests`` (who waits), ``inputs`` (what may be
asked for), ``results``, ``requests`` (who does it), and ``engine`` (as an engine offers it).
"""
