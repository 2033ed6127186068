"""Towers of transformers' that turn images into embeddings for a decoder.

May import ``loading``, ``slots`` and ``weights``.
"""
