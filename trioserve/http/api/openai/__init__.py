"""Code that the OpenAI endpoints share: fields, usage, structured output, the list of models."""
