"""The engine: its nursery and tasks, requests by Python, sessions, operators' calls, offline use.

Imported by the live view, HTTP, front ends, tests' fakes and the command line. Imports all that is
below HTTP.
"""
