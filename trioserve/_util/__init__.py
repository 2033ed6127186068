"""Helpers for channels, feeds and child processes, independent of language models.

They import only ``protocol`` from trioserve; every other folder may import them.

Imported by ``requests``, ``observability``, ``text``, ``media``, ``workers``, ``scheduler``,
``pooling``, ``engine``, ``observability.live``, ``http.server``, ``http.api``, ``front_ends``,
``testing``, ``load`` and ``cli``.
"""
