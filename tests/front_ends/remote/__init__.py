"""Tests of :mod:`trioserve.front_ends.remote`."""
