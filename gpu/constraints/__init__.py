"""Constraints on draws: masks, grammars, and the user's logits processors."""
