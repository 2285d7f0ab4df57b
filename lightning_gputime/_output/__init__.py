"""How a measurement and its diagnosis are shown: tables, notebooks, JSON.

Renderers belong here: they show a `Measurement` and the one `Diagnosis` of it. They compute no
statistics and judge nothing.
"""
