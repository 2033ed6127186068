"""Parsing of request bodies: typed fields, their bounds, and errors that name the client's field.

The APIs beside it import it.
"""
