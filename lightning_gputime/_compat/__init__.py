"""Internals of other libraries: one module per library, and no private name of any anywhere else.

Each name is a `Name` that says what cannot be measured without it, and has a fallback that turns
that feature off. Code that works with public interfaces alone does not belong here.
"""
