"""The command line: ``trioserve serve``, ``chat``, ``generate`` and ``doctor``.

Reading order: ``flags`` (the grammar, and from arguments to options), ``commands`` (which command
does what), then a file for each of them: ``serve``, ``terminal`` (chat and generate), ``doctor``;
``loading`` shows a model being loaded.
"""
