"""A GPU that isn't there: its queue, its memory, and the calls of torch and CuPy that reach them.

Work is queued and done as late as events and waits allow, or at random moments before. Calls that
CUDA refuses while a stream is captured are refused by name. ``queue`` knows no torch.
"""
