"""SGLang's ``/generate``: its fields and its answers."""
