"""Constraints on draws: masks, grammars, and the user's logits processors.

Imported by ``loading``, ``loading.loading`` and ``worker``.
"""
