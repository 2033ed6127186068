"""Whisper models: transformers' encoder of audio, and its decoder with paged attention.

- ``encoder``: audio to states, in a process beside the worker.
- ``decoder``: the decoder's layers.
- ``attention``: that over the KV cache, and over each slot's audio.
- ``rules``: the tokens that may come next in a transcript.
- ``alignment``: the times of a transcript's tokens.
- ``warping``: the path through tokens and frames that gives them.
- ``loading``: puts these together to an executor.

Imported by ``loading.loading``.
"""
