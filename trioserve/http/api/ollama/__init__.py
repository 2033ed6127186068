"""Ollama's ``/api``, served as chats and answered in lines of JSON."""
