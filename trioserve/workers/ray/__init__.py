"""Workers that Ray starts: a process that speaks with Ray, and the actors that run agents.

The port of the engine (:mod:`~trioserve.workers.ray.port`) runs the process
(:mod:`~trioserve.workers.ray.driver`), which places actors (:mod:`~trioserve.workers.ray.actor`).
Each actor runs an agent, which joins the port as one of another host does, or node 0 of its worker.
Only the process and the actors import ray.

Imported by ``engine``.
"""
