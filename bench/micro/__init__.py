"""What each part of the Python path costs, and how that grows with the rows of a step."""
