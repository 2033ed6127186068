"""Loading of models: device, number format, memory budget, and a runner that is ready for plans.

Imported by the worker. ``cpu``, ``cuda`` and ``models`` import the helpers shared by all loaders.
"""
