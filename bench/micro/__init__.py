"""The cost of each part of the Python path, and its growth with the rows of a step."""
