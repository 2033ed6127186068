"""Models in torch and their parts.

This package imports nothing by itself, because ``gpu.cpu`` imports parts of it without torch.
"""
