"""Helpers for channels, feeds and child processes that know nothing of language models.

Imports nothing of trioserve but ``protocol``; every other folder may import it.
"""
