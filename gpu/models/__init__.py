"""Models computed with torch, and what they are made of; a processor's own kernels import no torch.

So this package imports nothing by itself.
"""
