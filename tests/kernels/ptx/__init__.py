"""An interpreter of PTX: it executes what NVRTC makes of a kernel, without a GPU.

Semantics are those of NVIDIA's PTX ISA manual, written independently of ``gpu/kernels/emulation``,
so that the PTX bodies of ``hardware.cuh`` can be compared with their C++ twins.
"""
