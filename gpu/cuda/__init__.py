"""Steps on an NVIDIA GPU: loading, the executor, its state on the device, graphs, the sampler.

Imported by ``loading.loading`` and ``worker``.
"""
