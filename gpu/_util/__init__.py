"""Helpers of the worker that know nothing of models: logs, private files, uploads.

Imported by ``sampling``, ``kernels``, ``kernels.emulation``, ``lora``, ``cpu``, ``cuda`` and
``worker``.
"""
