"""All that the server and its worker process share: messages, sampling, grammars, errors.

Imports nothing else of trioserve. ``gpu`` imports this folder and ``model_files`` alone.
"""
