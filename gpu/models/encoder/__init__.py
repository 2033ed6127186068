"""Encoders: texts to embeddings, or to a score for each label.

Imported by ``loading.loading``.
"""
