"""Families without a file of their own: transformers' modules over this package's paged attention.

A model is loaded by transformers and keeps its own layers, experts, rotary embedding and head. Only
its attention is ours: transformers asks a function by name for it, and that function writes the new
keys and values into the paged cache and attends over block tables. So a step's rows stand one after
the other in one sequence, and each token brings its position.

- :mod:`~gpu.models.transformers_models.interface`: the function that transformers asks, and what it
hands
  on to.
- :mod:`~gpu.models.transformers_models.probing`: what each layer wants of its attention, learnt
from a run
  of three tokens; what can't be had is refused there.
- :mod:`~gpu.models.transformers_models.attention`: the paged cache, with layers of different
shapes.
- :mod:`~gpu.models.transformers_models.decoder`: the model, as the executor takes it.
- :mod:`~gpu.models.transformers_models.check`: a model that computes something else here than with
plain
  attention is not served.
- :mod:`~gpu.models.transformers_models.packing`: its matrices as the processor likes them.
- :mod:`~gpu.models.transformers_models.reading`: from files to a model.
- :mod:`~gpu.models.transformers_models.loading`: all of these, up to an executor.

Imported by ``loading.loading``.
"""
