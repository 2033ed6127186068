"""Images and audio of prompts: from what a client sends to arrays, in child processes.

:class:`~trioserve.media.reader.MediaReader` reads parts (:mod:`~trioserve.media.parts`). Nothing is
decoded in the server's own process: :mod:`~trioserve.media.child` is the program of the others.
"""
