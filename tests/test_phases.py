import dataclasses

import pytest

from lightning_gputime import StepTimes
from lightning_gputime._phases import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    AFTER_UPDATE,
    EXCLUDED,
    check_name,
    in_order,
    resolve_labels,
)


def phases(*labels: str) -> list[str]:
    return [names[-1] if names else "-" for names in resolve_labels(labels)]


def test_time_between_two_model_calls_is_forward() -> None:
    labels = ("forward", AFTER_FORWARD, "forward", AFTER_FORWARD, "backward")
    assert phases(*labels) == ["forward", "forward", "forward", "loss", "backward"]


def test_time_after_the_last_model_call_is_loss_if_a_backward_follows() -> None:
    assert phases("forward", AFTER_FORWARD, "other", "backward") == [
        "forward",
        "loss",
        "other",
        "backward",
    ]


def test_time_after_the_last_model_call_is_other_without_a_backward() -> None:
    assert phases("forward", AFTER_FORWARD) == ["forward", "other"]
    assert phases("forward", AFTER_FORWARD, "optimizer", AFTER_UPDATE) == [
        "forward",
        "other",
        "optimizer",
        "other",
    ]


def test_time_after_backward_is_optimizer_if_an_update_follows() -> None:
    assert phases("backward", AFTER_BACKWARD, AFTER_UPDATE) == ["backward", "optimizer", "other"]
    assert phases("backward", AFTER_BACKWARD) == ["backward", "other"]


def test_time_after_backward_is_other_before_the_next_micro_batch() -> None:
    for between in ("data", "callbacks", "callbacks/Saves.on_train_batch_end"):
        labels = ("backward", AFTER_BACKWARD, between, "forward", "backward", AFTER_BACKWARD)
        assert phases(*labels, AFTER_UPDATE)[1] == "other"
        assert phases(*labels, AFTER_UPDATE)[5] == "optimizer"


def test_phase_by_hand_does_not_hide_what_follows() -> None:
    assert phases(AFTER_FORWARD, "augment", AFTER_FORWARD, "backward") == [
        "loss",
        "augment",
        "loss",
        "backward",
    ]


def test_sub_phase_also_counts_for_its_parent() -> None:
    assert resolve_labels(("forward/body", "forward")) == (
        ("forward", "forward/body"),
        ("forward",),
    )
    assert resolve_labels(("a/b/c",)) == (("a", "a/b", "a/b/c"),)


def test_excluded_time_counts_for_nothing() -> None:
    assert resolve_labels((EXCLUDED, "data")) == ((), ("data",))


def test_phases_sort_as_a_step_runs_them() -> None:
    names = ["augment", "backward/comm", "other", "backward", "callbacks", "data/copy", "data"]
    data = ["data", "data/copy", "callbacks"]
    assert in_order(names) == [*data, "backward", "backward/comm", "other", "augment"]


@pytest.mark.parametrize(
    "name", ["", "/", "forward/", "/comm", "a//b", "<x>", "step", "host_wait", "step/x"]
)
def test_unusable_name_is_refused_with_the_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'"):
        check_name(name)


def test_name_with_control_characters_would_break_a_table() -> None:
    for end in ("\x85", "\x9b", "\u2028"):
        with pytest.raises(ValueError, match="is not usable"):
            check_name(f"a{end}b")
    with pytest.raises(ValueError, match=r"'a\\nb' is not usable: .* control characters"):
        check_name("a\nb")


def test_name_that_is_no_string_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['a'\] is not usable"):
        check_name(["a"])  # type: ignore[arg-type]


def test_usable_name_is_returned() -> None:
    assert check_name("my augment/part 1") == "my augment/part 1"


def test_step_times_are_frozen() -> None:
    times = StepTimes(0, {}, {}, 0.0, 0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        times.step = 1  # type: ignore[misc]
