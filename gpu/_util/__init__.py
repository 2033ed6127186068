"""Helpers of the worker that know nothing of models: logs, private files, uploads."""
