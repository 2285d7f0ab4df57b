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

GPU, LAUNCH, SYNC, COMPUTE = "GPU-bound", "launch-bound", "sync-bound", "compute-bound"
INPUT, COPIES, COMMUNICATES, RANK = "input-bound", "copy-bound", "communication-bound", "rank-bound"
STARTUP, PHASE = "startup-bound", "phase-bound"

# Names of entries that are not phases.
HOOKS = "data (transfer hooks)"  # `data` without fetch and copy, if a trainer separates them.
COMMUNICATION = "communication"
OTHER_RANKS = "other ranks"
SLOWEST_RANK = "the slowest rank"
GAPS = "launch gaps"
SLOW = "slow steps: "
COLLECTIONS, COMPILATIONS = f"{SLOW}garbage collection", f"{SLOW}compilation"
ALLOCATOR, CONTENTION = f"{SLOW}the allocator", f"{SLOW}{OFF_CPU}"
TIMING = "timing itself"
NOT_SAMPLED = "not sampled"
GPU_WORK, CPU_WORK = "GPU work", "CPU work"

STANDARD_PHASES = (*PHASES, GENERATE, REWARD, TRAINING_STEP)  # All except phases named by the user.

CODES: Mapping[str, str] = {
    DATA: INPUT,
    FETCH: INPUT,
    HOOKS: INPUT,
    COPY: COPIES,
    CALLBACKS: "callback-bound",
    COMMUNICATION: COMMUNICATES,
    OTHER_RANKS: RANK,
    SLOWEST_RANK: RANK,
    GAPS: LAUNCH,
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
    SET_UP: STARTUP,
    SANITY_CHECK: STARTUP,
    FIRST_STEP: STARTUP,
    TEAR_DOWN: "tear-down-bound",
    PAUSED: "paused-bound",
    BETWEEN_LOOPS: "between-loops-bound",
}
