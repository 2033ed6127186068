"""Faults on the real thing: real processes, real sockets, and what is left after the worst.

``python -m tests.faults`` runs everything in short form; each module has a command line of its own.
``docs/reliability.md`` says what is promised, and shows the figures.
"""
