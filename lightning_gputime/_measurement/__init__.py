"""Statistics of step records: sums, history, wall clock, work rates, slow steps.

Each class owns its state and returns facts. The code is plain Python and NumPy: no module imports
torch, and clocks are passed in. Advice belongs in `_diagnosis` or to its feature, and text around
numbers in `_output`.

Start with `results`: `Results` passes the steps that were read to the other classes, and returns a
`measurement.Measurement`, with statistics of each phase.

- Timed steps: `sums` adds them up, `history` keeps the newest.
- All steps: `untimed` estimates the phases of untimed steps, `wall_clock` the rest of the run.
- Conspicuous steps: `slow` sums single slow steps, `changes` finds lasting changes.
- `memory` has the peak memory, `observers` calls the user's observers.
"""
