"""Towers of transformers' that turn images and audio into embeddings for a decoder.

May import ``loading``, ``slots`` and ``weights``.
"""
