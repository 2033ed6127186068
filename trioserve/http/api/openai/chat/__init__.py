"""``/v1/chat/completions``: from a conversation to jobs, and from outputs to its answers."""
