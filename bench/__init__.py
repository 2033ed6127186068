"""Benchmarks: scenarios, peers, and their results. See README.md."""
