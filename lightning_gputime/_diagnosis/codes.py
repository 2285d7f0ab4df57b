"""Verdict codes, and the names of entries of the time breakdown."""

from collections.abc import Mapping

from lightning_gputime._measurement.slow import OFF_CPU
from lightning_gputime._measurement.wall_clock import (
    BETWEEN_LOOPS,
    CHECKPOINTS,
    EPOCH_ENDS,
    EVALUATION,
    FIRST_STEP,
    PAUSED,
    SANITY_CHECK,
    SET_UP,
    TEAR_DOWN,
    VALIDATION,
)
from lightning_gputime._phases import (
    BACKWARD,
    COPY,
    DATA,
    FETCH,
    FORWARD,
    GENERATE,
    OPTIMIZER,
    PHASES,
    REWARD,
    TRAINING_STEP,
)

INPUT_BOUND = "input-bound"  # The step waits for data.
HOST_BOUND = "host-bound"  # A line keeps the GPU waiting; on a CPU, a line outside of the model.
LAUNCH_BOUND = "launch-bound"  # The GPU waits for launches of the model's work, at many lines.
GPU_BOUND, COMPUTE_BOUND = "GPU-bound", "compute-bound"  # The model's work, on a GPU or a CPU.
COMMUNICATION_BOUND, STRAGGLER_BOUND = "communication-bound", "straggler-bound"
OVERHEAD_BOUND = "overhead-bound"  # Code outside of steps.

# Names of entries that are neither phases nor code.
TRANSFER_HOOKS = "data (transfer hooks)"  # `data` without its parts fetch and copy.
COMMUNICATION = "communication"
OTHER_RANKS = "other ranks"
SLOWEST_RANK = "the slowest rank"
SLOW = "slow steps: "
COLLECTIONS, COMPILATIONS = f"{SLOW}garbage collection", f"{SLOW}compilation"
ALLOCATOR, CONTENTION = f"{SLOW}the allocator", f"{SLOW}{OFF_CPU}"
TIMING = "timing itself"
NOT_SAMPLED = "not sampled"
NOT_EXAMINED = " (not examined)"  # Follows the name of a phase: its time in no examined step.

STANDARD_PHASES = (*PHASES, GENERATE, REWARD, TRAINING_STEP)  # All except phases named by the user.
MODEL_PHASES = (FORWARD, BACKWARD, OPTIMIZER, TRAINING_STEP)  # Phases of the model's own work.

# Verdict code of each entry that is not code of the user.
CODES: Mapping[str, str] = {
    **dict.fromkeys((DATA, FETCH, TRANSFER_HOOKS, COPY), INPUT_BOUND),
    COMMUNICATION: COMMUNICATION_BOUND,
    OTHER_RANKS: STRAGGLER_BOUND,
    SLOWEST_RANK: STRAGGLER_BOUND,
    **dict.fromkeys((COLLECTIONS, COMPILATIONS, ALLOCATOR, CONTENTION), HOST_BOUND),
    **dict.fromkeys(
        (
            *(VALIDATION, EVALUATION, CHECKPOINTS, EPOCH_ENDS, PAUSED, BETWEEN_LOOPS),
            *(SET_UP, SANITY_CHECK, FIRST_STEP, TEAR_DOWN),
        ),
        OVERHEAD_BOUND,
    ),
}
