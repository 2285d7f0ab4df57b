"""Internals of other libraries: one module per library, and no private name anywhere else.

Each name is a `Name`, looked up in one place. It says what cannot be measured without it, and has a
fallback that turns that feature off. Code that needs only public interfaces does not belong here.
"""
