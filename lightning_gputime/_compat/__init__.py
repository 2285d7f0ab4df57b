"""Wrappers around internals of other libraries, which no other folder uses.

Belongs here: each private name as a `Name`, with a fallback that disables features that need it.
Belongs elsewhere: code that only needs public interfaces.
"""
