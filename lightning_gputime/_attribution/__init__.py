"""Causes of slow steps outside of the loop's code: the machine, the batch and the GPU's clock.

- `surroundings` joins the times of steps with the others, for one session.
- `machine` reads threads, processes and the system. `batch` has the content of the batches, and
  `gpu_clock` the clock of the GPU.
- `overlap` tests which of these candidates coincide with slow steps.

The causes that were found, their sentences and their advice are in `_measurement.outside`.
"""
