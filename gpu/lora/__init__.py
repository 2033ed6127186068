"""LoRA: low-rank updates of a model's matrix products, chosen by each sequence.

An adapter has two small matrices for some of the model's projections: what a projection gives for a
token x gets ``scale * B (A x)`` added. Files are read by :mod:`gpu.lora.reading`, a device's own
form of them is kept by :mod:`gpu.lora.store`, and a step's tokens are put together by adapter in
:mod:`gpu.lora.groups`. What computes is beside the rest that does: :mod:`gpu.cpu.adapters`,
:mod:`gpu.cuda.adapters` with :mod:`gpu.lora.adapter_slots`, and :mod:`gpu.lora.torch_adapters`, the
reference.

Imported by ``models``, ``loading``, ``cpu``, ``cuda``, ``models.transformers_models`` and
``worker``.
"""
