"""Small endpoints beside the generating ones: tokens, versions, load, health."""
