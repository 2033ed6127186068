"""Images, audio and videos of prompts: from what a client sends to arrays and embeddings.

:class:`.reader.MediaReader` reads parts (:mod:`.parts`), and :class:`.embedding.MediaEmbedder` has
a worker compute their embeddings. Nothing is decoded in the server's own process: :mod:`.child` is
the program of the others. May import ``observability`` beside what ``requests`` may.
"""
