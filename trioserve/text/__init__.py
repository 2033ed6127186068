"""Text to tokens and back: chat templates, tokenizer, detokenizer, stop conditions, tool calls.

Imported by ``pooling``, ``engine``, ``http.api``, ``front_ends`` and ``testing``.
"""
