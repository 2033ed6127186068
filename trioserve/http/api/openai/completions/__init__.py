"""``/v1/completions``: from prompts to jobs, and from outputs to its answers."""
