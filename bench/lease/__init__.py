"""A rented GPU, used in three commands of ten minutes: ``python -m bench.lease``.

:mod:`bench.lease.plan` decides what runs, in which order and for how long, and
:mod:`bench.lease.running` runs it. Both need the standard library alone, for they start on a
machine that has torch and little else.
"""
