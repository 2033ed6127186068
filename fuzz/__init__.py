"""Fuzzing of everything that reads what others wrote: ``python -m fuzz --help``.

A :class:`~fuzz.target.Target` is one decoder and what may come out of it. The tests run each of
them on its seeds, on mutations that are the same every time, and on inputs that once broke
something (``tests/fuzz_inputs``); atheris runs them for as long as one likes.
"""
