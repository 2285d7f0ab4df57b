"""A timer for a Trainer of transformers that has none."""

from typing import Any

import transformers

from lightning_gputime._auto_instrumentation import options_of_all, tells_errors


def watch(wanted: dict[str, Any]) -> None:
    """Give each Trainer that is made from now on a callback that adds a timer."""

    class TrainerAdder(transformers.TrainerCallback):
        """A callback whose place a `PhaseTimeCallback` takes when training begins."""

        @tells_errors()
        def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            """Add the timer."""
            # Not above: a script may be importing it now, which imports the Trainer.
            from lightning_gputime._auto_instrumentation import adding
            from lightning_gputime.huggingface import PhaseTimeCallback, find_trainer

            timer = PhaseTimeCallback(**options_of_all(wanted))
            timer._submodules(known["model"])  # Raises if a name is wrong.
            trainer = find_trainer(self)
            if trainer and adding.take_place(trainer.callback_handler.callbacks, self, timer):
                timer.on_train_begin(args, state, control, **known)
                adding.show_at_exit(timer, wanted, prints=False)

    defaults: list[Any] = transformers.trainer.DEFAULT_CALLBACKS
    defaults.append(TrainerAdder)
