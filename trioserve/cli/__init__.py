"""The command line: ``trioserve serve``, ``chat``, ``generate``, ``bench``, ``top`` and ``doctor``.

Reading order: ``parser`` (the grammar, with ``command_parser`` and ``help``), ``flags`` (options
from arguments and variables), ``commands`` (a function for each command), then a module for each.

Imported by no other folder.
"""
