"""Timers that are added to the Trainer of transformers."""

from typing import Any

import transformers

from lightning_gputime._auto_instrumentation.environment import (
    options,
    suppress_errors,
    timer_options,
)
from lightning_gputime._compat.transformers_ import callbacks_of


class TrainerAdder(transformers.TrainerCallback):
    """Placeholder callback that a `TransformersPhaseTimer` replaces when training begins."""

    @suppress_errors()
    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        # Import here: this module is loaded while transformers imports its Trainer.
        from lightning_gputime._auto_instrumentation import adding
        from lightning_gputime.huggingface import TransformersPhaseTimer, find_trainer

        wanted = options() or {}
        timer = TransformersPhaseTimer(**timer_options(wanted))
        trainer = find_trainer(self)
        if trainer is None:
            return
        if not adding.replace_with_timer(self, callbacks_of(trainer), timer, wanted):
            return
        save = adding.finish_at_exit(timer, wanted, prints=False)

        # The Trainer may train again: save each training to a separate file.
        def save_and_begin(*event: Any, **known: Any) -> None:
            nonlocal save
            if save is not None:
                save()
                save = adding.finish_at_exit(timer, wanted, prints=False)
            TransformersPhaseTimer.on_train_begin(timer, *event, **known)

        timer.on_train_begin(args, state, control, **known)
        vars(timer)["on_train_begin"] = save_and_begin
