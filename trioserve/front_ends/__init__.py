"""Front-end processes: HTTP, tokenizing and detokenizing in several processes, one engine.

::

    clients ──HTTP──▶ front end 0 ─┐  (the application, tokenizer, detokenizer, streams)
    clients ──HTTP──▶ front end 1 ─┼══nng══▶ engine process ══nng══▶ worker
    clients ──HTTP──▶ front end 2 ─┘  (preparation, scheduler, supervisors)

In a front end an engine is made of the same parts as in a process of one's own; only the scheduler
is :class:`~trioserve.front_ends.client.scheduler.RemoteScheduler`, which sends requests to the
engine process and takes what they give. In the engine process each front end has a
:class:`~trioserve.front_ends.server.session.Home`, which makes requests for the scheduler of what
comes.

Reading order: ``messages`` with ``faults`` and ``clock`` (what is said), ``merging`` (of several
steps one), ``rpc`` (questions either way), ``remote`` with ``sent_requests`` (the front end's
side), ``peer`` with ``hosted_requests`` and ``context`` (the engine's side), ``hosted_turns`` and
``remote_turns`` (sessions, on either side), ``hosted_seats`` (limits of keys), ``hosted_watches``
(who watches), ``engine_server`` (the engine process without the processes it starts), ``heartbeat``
(whether a front end lives), ``process`` (one front end's life) and ``fleet`` (all of them),
``main`` (the front end's own program) and ``shared`` (what its HTTP tells of the whole server).
"""
