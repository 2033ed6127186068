"""Sampling: samplers with their inputs and outputs, log-probabilities, random numbers.

Imported by the executors and the runner.
"""
