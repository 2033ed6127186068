"""Encoders: embeddings of texts, or a score for each label.

Imported by ``loading.loading``.
"""
