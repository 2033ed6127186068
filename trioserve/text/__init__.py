"""Text to tokens and back: templates, the tokenizer, the detokenizer, what ends an output."""
