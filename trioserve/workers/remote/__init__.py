"""Workers on other hosts: the engine's port for them, the links, and the agent on their host.

An agent (:mod:`~trioserve.workers.remote.agent`) dials the engine's port
(:mod:`~trioserve.workers.remote.port`) and passes messages on between the engine and a worker
process of its own. Both ends have a certificate of one private authority.

Front ends of other hosts join at the same port.

Imported by ``engine``, ``front_ends`` and ``cli``.
"""
