"""Anthropic's ``/v1/messages``: its fields made a chat's, and answers made its messages."""
