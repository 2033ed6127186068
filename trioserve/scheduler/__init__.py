"""The scheduler: which sequences compute what in each step, over one worker.

``scheduler.py`` is the task, ``core.py`` the state machine; both are used by the engine alone.
Pooling, metrics and the live view read its statistics.

Reading order:

- ``scheduler``: the task;
- ``limits`` and ``policy``: the bounds and the choices;
- ``core`` with ``state`` and ``planning``: the state machine;
- ``sequence_state`` and ``token_counts``: the progress of one sequence, and of all;
- ``waiting_queue`` and ``sequence_group``: the queue, and several outputs of one request;
- ``memory`` with ``slots``, ``page_pool``, ``host_pages`` and ``prefix_cache``: slots and pages;
- ``page_priorities`` with ``prefix_pins`` and ``eviction``: the value of cached pages;
- ``step_time``: the time of a step, learned from results;
- ``plan_builder``, ``result_validation`` and ``result_processing``: a plan and its result;
- ``plan_sender`` and ``calls``: plans on their way to the worker, and other calls;
- ``adapter_residency`` with ``adapters``: the adapters in the worker's memory;
- ``pause_gate`` with ``pause_control``, and ``weights``: pauses and weight swaps;
- ``recovery`` with ``fault_isolation``: failures;
- ``hang_detection`` with ``watchdog``: hung workers;
- ``feeds`` with ``iterations`` and ``cache_events``: event streams;
- ``invariants``: assertions over the whole state.

Imported by ``pooling``, ``engine``, ``observability.live``, ``http.api``, ``front_ends`` and
``testing``.
"""
