"""All options of the engine and the server. Names are vLLM's where vLLM has the option.

:mod:`trioserve.config.options` makes a flag and an environment variable of each.

Imported by ``requests``, ``observability``, ``text``, ``media``, ``workers``, ``scheduler``,
``pooling``, ``engine``, ``observability.live``, ``http.server``, ``http.api``, ``front_ends``,
``testing`` and ``cli``.
"""

from __future__ import annotations

from trioserve.config.engine import EngineConfig as EngineConfig
from trioserve.config.options import OptionGroup
from trioserve.config.server import ServerConfig as ServerConfig

_TITLES = {
    "model": "Model",
    "adapters": "Adapters",
    "media": "Media",
    "scheduling": "Scheduling",
    "memory": "Memory",
    "worker": "Worker process",
    "http": "HTTP server",
    "log": "Logging",
}
GROUPS = {name: OptionGroup(title, f"options#{title}") for name, title in _TITLES.items()}
"""Groups of options, in the order of help and documentation."""
