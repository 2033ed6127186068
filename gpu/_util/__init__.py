"""Helpers of the worker that don't depend on models: logs, private files, uploads.

Imported by ``sampling``, ``kernels``, ``kernels.emulation``, ``lora``, ``cpu``, ``cuda`` and
``worker``.
"""
