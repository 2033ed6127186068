"""Endpoints that control a running server: pause, abort, empty the cache. Admins only."""
