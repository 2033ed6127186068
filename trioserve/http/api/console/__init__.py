"""The console: a page that the server itself serves, and the live feed that it shows."""
