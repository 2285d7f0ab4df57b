"""Labels of marks, and the phases that they become."""

import pytest

from lightning_gputime._phases import (
    AFTER_BACKWARD,
    AFTER_UPDATE,
    EXCLUDED,
    check_name,
    in_order,
    resolve_labels,
)


@pytest.mark.parametrize("between", ["data", "callbacks", "callbacks/Saves.on_train_batch_end"])
def test_time_after_backward_is_other_before_the_next_micro_batch(between: str) -> None:
    labels = ("backward", AFTER_BACKWARD, between, "forward", "backward", AFTER_BACKWARD)
    resolved = resolve_labels((*labels, AFTER_UPDATE))
    assert (resolved[1], resolved[5]) == (("other",), ("optimizer",))


def test_sub_phases_also_count_for_their_parents() -> None:
    assert resolve_labels(("forward/body", "forward", "a/b/c", EXCLUDED, "data")) == (
        ("forward", "forward/body"),
        ("forward",),
        ("a", "a/b", "a/b/c"),
        (),
        ("data",),
    )


def test_phases_are_sorted_in_the_order_of_a_step() -> None:
    names = ["augment", "backward/comm", "other", "backward", "callbacks", "data/copy", "data"]
    data = ["data", "data/copy", "callbacks"]
    assert in_order(names) == [*data, "backward", "backward/comm", "other", "augment"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, f"'{name}'") for name in ("", "/", "forward/", "/comm", "a//b", "<x>")),
        *((name, f"'{name}'") for name in ("step", "host_wait", "step/x")),
        ("a\x85b", "is not valid"),
        ("a\x9bb", "is not valid"),
        ("a\u2028b", "is not valid"),
        ("a\nb", r"'a\\nb' is not valid: .* control characters"),
        (["a"], r"\['a'\] is not valid"),
    ],
)
def test_invalid_phase_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_name(name)


def test_valid_phase_name_is_returned() -> None:
    assert check_name("my augment/part 1") == "my augment/part 1"
