"""Wrappers around internals of other libraries, which no other folder uses.

Each private name is declared here as a `Name`, with a fallback that disables the features that need
it. Code that only needs public interfaces belongs elsewhere.
"""
