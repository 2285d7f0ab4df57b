"""Ledger: which line of the user's code is the reason for each millisecond of a step.

In a few steps, the examined steps, each line of the user's code is a mark, too.

- `examiner` chooses the examined steps, and marks their lines. `_session.schedule` chooses the
  timed steps.
- `watch` follows the lines that run. `places` are the functions and lines of the user's code.
- `pace` compares the clocks of host and device, and decides which set the pace of a phase.
- `cells` divides an examined step into its times by place, phase and pace: host-paced, paced by
  the device, or idle.
- `rows` sums up these times by line or function, as shown to the user.
- `ledger` has the facts of a run: examined steps, the lines that ran outside of steps, the pace of
  all timed steps, and the rows.
"""
