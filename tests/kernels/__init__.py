"""Tests of the CUDA kernels, in the emulation or (``--kernels-on=gpu``) on a GPU."""
