"""Steps on the CPU: compiled C++ where it can be built and the processor has it, else torch.

Imported by ``models.transformers_models``, ``loading.loading`` and ``__main__``.
"""
