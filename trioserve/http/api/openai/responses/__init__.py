"""OpenAI's ``/v1/responses``: chats under other names, with answers kept for later requests."""
