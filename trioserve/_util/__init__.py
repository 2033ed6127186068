"""Helpers for channels, feeds and child processes, independent of language models.

They import only ``protocol`` from trioserve; every other folder may import them.
"""
