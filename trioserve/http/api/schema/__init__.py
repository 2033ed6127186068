"""Reading of request bodies: typed fields, their bounds, and errors that name the client's field.

Imported by the APIs beside it.
"""
