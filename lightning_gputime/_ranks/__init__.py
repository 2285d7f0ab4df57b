"""Ranks of a distributed run: which one do the others wait for, and why?

Each rank sends its totals to rank zero, which compares them. The waits of a rank are marked in
`_instrumentation`, the advice is in `_diagnosis`.

- `totals` has the facts that a rank sends, and packs them.
- `comparison` finds the straggler: read `compare` from the local times to the `RankSummary`.
- `over_time` finds how the straggler changes over the run, and draws it in a terminal.
- `exchange` sends the totals, and makes all ranks time the same steps.
"""
