"""Requests and their results: states, admission, streams, log-probabilities, retention.

Imported by text, scheduler, pooling, engine and all above. Imports ``config`` and what is below it.
"""
