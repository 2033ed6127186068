"""Transcripts of speech: the audio's windows, their prompts, and the segments of their output.

May import ``model_files`` and ``requests.media`` beside what ``requests`` may.
"""
