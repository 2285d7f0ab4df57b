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
    CALLBACKS,
    COPY,
    DATA,
    FETCH,
    GENERATE,
    LOSS,
    OPTIMIZER,
    OTHER,
    PHASES,
    REWARD,
    TRAINING_STEP,
)

GPU_BOUND, LAUNCH_BOUND, SYNC_BOUND = "GPU-bound", "launch-bound", "sync-bound"
COMPUTE_BOUND, COMMUNICATION_BOUND = "compute-bound", "communication-bound"
PHASE_BOUND = "phase-bound"  # Verdict on a phase named by the user.

# Names of entries that are not phases.
TRANSFER_HOOKS = "data (transfer hooks)"  # `data` without its parts fetch and copy.
COMMUNICATION = "communication"
OTHER_RANKS = "other ranks"
SLOWEST_RANK = "the slowest rank"
LAUNCH_GAPS = "launch gaps"
SLOW = "slow steps: "
COLLECTIONS, COMPILATIONS = f"{SLOW}garbage collection", f"{SLOW}compilation"
ALLOCATOR, CONTENTION = f"{SLOW}the allocator", f"{SLOW}{OFF_CPU}"
TIMING = "timing itself"
NOT_SAMPLED = "not sampled"
GPU_WORK, CPU_WORK = "GPU work", "CPU work"

STANDARD_PHASES = (*PHASES, GENERATE, REWARD, TRAINING_STEP)  # All except phases named by the user.

# Verdict code of each entry that can be the bottleneck.
CODES: Mapping[str, str] = {
    DATA: "input-bound",
    FETCH: "input-bound",
    TRANSFER_HOOKS: "input-bound",
    COPY: "copy-bound",
    CALLBACKS: "callback-bound",
    COMMUNICATION: COMMUNICATION_BOUND,
    OTHER_RANKS: "rank-bound",
    SLOWEST_RANK: "rank-bound",
    LAUNCH_GAPS: LAUNCH_BOUND,
    LOSS: "loss-bound",
    OPTIMIZER: "optimizer-bound",
    OTHER: "other-bound",
    COLLECTIONS: "gc-bound",
    COMPILATIONS: "compile-bound",
    ALLOCATOR: "allocator-bound",
    CONTENTION: "cpu-contention",
    VALIDATION: "validation-bound",
    EVALUATION: "evaluation-bound",
    CHECKPOINTS: "checkpoint-bound",
    EPOCH_ENDS: "epoch-end-bound",
    SET_UP: "startup-bound",
    SANITY_CHECK: "startup-bound",
    FIRST_STEP: "startup-bound",
    TEAR_DOWN: "tear-down-bound",
    PAUSED: "paused-bound",
    BETWEEN_LOOPS: "between-loops-bound",
}
