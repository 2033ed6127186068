"""Front-end processes: HTTP, tokenizing and detokenizing in several processes, one engine.

::

    clients ──HTTP──▶ front end 0 ─┐  (the application, tokenizer, detokenizer, streams)
    clients ──HTTP──▶ front end 1 ─┼══nng══▶ engine process ══nng══▶ worker
    clients ──HTTP──▶ front end 2 ─┘  (validation, scheduler, supervisors)

A front end runs a :class:`~trioserve.engine.request_engine.RequestEngine`. Its back end is
:class:`~trioserve.front_ends.client.scheduler.RemoteScheduler`, which sends requests to the engine
process and takes their outputs. In the engine process each front end has a
:class:`~trioserve.front_ends.server.session.FrontEndSession`, which makes requests for the
scheduler from messages.

Reading order: ``messages`` with ``wire_errors`` and ``clock``, ``coalesce`` (several steps as one),
``rpc`` and ``calls`` (the table of remote calls), ``client/scheduler`` with ``client/requests``,
``server/session`` with ``server/requests`` and ``server/context``, ``server/turns`` and
``client/turns`` (sessions), ``server/permits`` (limits of keys), ``server/subscriptions``
(snapshots), ``server/peers`` and ``server/administration`` (operators' calls),
``server/engine_server`` (the engine process without the processes that it starts), ``heartbeat``,
``processes/process`` (the life of one front end) and ``processes/pool`` (all of them),
``client/front_end`` (a front end at work), ``client/main`` (its own program),
``client/server_api`` (the whole server for its HTTP), and ``remote/agent`` with ``remote/joined``
and ``files`` (front ends on other hosts).

Imported by ``cli``.
"""
