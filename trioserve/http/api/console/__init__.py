"""The console: a page that the server itself serves, and its live feed."""
