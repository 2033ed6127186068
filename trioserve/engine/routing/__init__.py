"""Routing: the choice of a worker for each request, and again if its worker is lost.

:mod:`~trioserve.engine.routing.policy` has the choices, which are pure;
:mod:`~trioserve.engine.routing.router` reads the state of the schedulers for them.
"""
