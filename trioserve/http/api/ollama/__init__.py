"""Ollama's ``/api``: its fields made a chat's, and answers made its lines of JSON."""
