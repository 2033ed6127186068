"""OpenAI's ``/v1/responses``: chats in other words, whose answers are kept for later ones."""
