"""Text to tokens and back: templates, the tokenizer, the detokenizer, what ends an output.

Imported by ``pooling``, ``engine``, ``http.api``, ``front_ends`` and ``testing``.
"""
