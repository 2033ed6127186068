"""Families without a native implementation: transformers' modules with paged attention.

Transformers loads a model, which keeps its own layers, experts, rotary embedding and head. Only its
attention is replaced, by a function registered under a name. This function writes new keys and
values to the paged cache and attends over block tables. A step's rows are therefore concatenated to
one sequence, with a position for each token.

- :mod:`~gpu.models.transformers_models.interface`: the registered function.
- :mod:`~gpu.models.transformers_models.probing`: finds the shape of each layer's attention by
  running three tokens, and refuses what isn't supported.
- :mod:`~gpu.models.transformers_models.attention`: the paged cache, for layers of different shapes.
- :mod:`~gpu.models.transformers_models.images`: the part of it for images whose tokens see each
  other.
- :mod:`~gpu.models.transformers_models.decoder`: the model's interface to the executor.
- :mod:`~gpu.models.transformers_models.check`: refuses a model with other results than with
  transformers' attention.
- :mod:`~gpu.models.transformers_models.packing`: packs its linear layers for the CPU.
- :mod:`~gpu.models.transformers_models.reading`: loads a model from its folder.
- :mod:`~gpu.models.transformers_models.loading`: puts these together to an executor.
- :mod:`~gpu.models.transformers_models.tower_process`: the towers of models that read media, on a
  CPU, in a process.

Imported by ``loading.loading`` and ``__main__``.
"""
