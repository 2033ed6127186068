"""Constraints on sampled tokens: masks, grammars, and logits processors.

Imported by ``loading``, ``loading.loading`` and ``worker``.
"""
