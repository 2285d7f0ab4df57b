"""Internals of other libraries. No other room uses private names of another library.

Belongs here: each private name as a `Name`, with a fallback that disables what needs it.
Does not: code that only needs public interfaces.
"""
