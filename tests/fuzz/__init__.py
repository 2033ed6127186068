"""Fuzzing of everything that reads what others wrote: ``python -m fuzz --help``.

A :class:`~fuzz.target.Target` is one decoder and what may come out of it. The tests run each of
them on its seeds and on mutations that are the same every time, and hold what was once found in
tests of its own; atheris runs them for as long as one likes.
"""
