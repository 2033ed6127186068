"""The engine for programs without trio: ``LLM`` for plain threads, ``AsyncLLM`` for asyncio.

``engine_thread`` runs trio and one engine in a thread and calls functions there: those of
``batch``, ``texts`` and ``properties``, and ``recording``, which keeps the output of one request.
``llm`` and ``generation`` wait for them in a thread; ``async_llm`` and ``async_generation``, the
only modules of the package that import asyncio, wait in its loop.
"""
