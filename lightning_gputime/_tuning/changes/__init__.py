"""Changes that `tune` tries: one file each, and one line in `PROPOSALS`."""

from lightning_gputime._tuning.change import Proposal
from lightning_gputime._tuning.changes import (
    compilation,
    fused,
    loader,
    logging,
    precision,
    torch_settings,
)

PROPOSALS: tuple[Proposal, ...] = (
    loader.propose,
    fused.propose,
    torch_settings.propose,
    logging.propose,
    precision.propose,
    compilation.propose,
)
