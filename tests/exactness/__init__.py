"""The matrix of exactness: outputs have the same bits however they come to be computed.

:mod:`.dimensions` lists what may differ, and chooses configurations that have every pair of values.
:mod:`.probes` are requests, and what of their answers is compared. :mod:`.run` serves them in one
configuration. ``python -m tests.exactness`` runs it on any model.
"""
