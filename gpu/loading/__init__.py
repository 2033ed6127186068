"""Models into memory: devices, formats, memory budgets, and a runner that is ready for plans.

Imported by the worker; ``cpu``, ``cuda`` and ``models`` import what all ways of loading share.
"""
