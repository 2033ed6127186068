"""Anthropic's ``/v1/messages``, served as chats."""
