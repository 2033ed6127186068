"""Endpoints for texts as a whole: embeddings, scores, ranks and labels."""
