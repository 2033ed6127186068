"""Sessions: trees of turns that share a history and its cached pages.

Imported by the engine, its front ends and HTTP.
"""
