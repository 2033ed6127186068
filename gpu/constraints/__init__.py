"""What a draw is held to: masks, grammars, and logits processors of the user's own."""
