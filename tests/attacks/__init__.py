"""Attacks on a real server, each with its bounds; docs/security.md has the table of them."""
