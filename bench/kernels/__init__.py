"""Each kernel beside its floor and its peers: ``python -m bench.kernels``."""
