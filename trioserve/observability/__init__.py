"""Metrics, logs, traces and dumps of tasks: what an operator sees of an engine.

Imported by every folder above ``requests``; ``live`` stands above the engine and is imported by
HTTP.
"""
