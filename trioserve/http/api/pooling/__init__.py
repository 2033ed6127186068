"""Endpoints that compute one result for a whole text: embeddings, scores, ranks and labels."""
