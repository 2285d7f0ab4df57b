"""`PhaseTimeMetric`: alone, in collections, across ranks, and from a checkpoint."""

import pickle
from typing import Any

import pytest
import torch
from fake_gpu import FakeGPU
from fake_loop import Loop, train
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection

from lightning_gputime import GPUPhaseTimer, PhaseTimeMetric, StepTimes


def times(forward_ms: float, backward_ms: float = 8.0, comm_ms: float | None = None) -> StepTimes:
    phase_ms = {"forward": forward_ms, "backward": backward_ms}
    if comm_ms is not None:
        phase_ms["backward/comm"] = comm_ms
    return StepTimes(
        step=0, phase_ms=phase_ms, host_ms={}, host_wait_ms=0.0, step_ms=forward_ms + backward_ms
    )


def gathers(*others: PhaseTimeMetric) -> Any:
    """A gather that appends the states of `others` to those of the metric."""
    states = [(metric.sums_ms, metric.counts) for metric in others]

    def gather(tensor: Tensor, group: Any) -> list[Tensor]:
        return [tensor, *(state[0 if tensor.is_floating_point() else 1] for state in states)]

    return gather


def test_metric_is_the_mean_of_the_steps_in_which_a_phase_ran() -> None:
    metric = PhaseTimeMetric()
    metric.update(times(3.0))
    metric.update(times(5.0))
    values = {key: value.item() for key, value in metric.compute().items()}
    assert values["forward_ms"] == 4.0
    assert values["step_ms"] == values["local_ms"] == 12.0
    assert values["slowest_rank"] == -1
    assert "data_ms" not in values
    metric.reset()
    with pytest.warns(UserWarning, match="called before the ``update``"):
        assert metric.compute() == {}


def test_metric_has_bounds_over_ranks_and_the_slowest_rank() -> None:
    first, second = PhaseTimeMetric(), PhaseTimeMetric()
    for _ in range(3):
        first.update(times(4.0, 8.0, 0.5))
    for _ in range(2):
        second.update(times(4.0, 8.0, 0.5))
    zero = PhaseTimeMetric(
        dist_sync_fn=gathers(first, second), distributed_available_fn=lambda: True
    )
    for _ in range(2):
        zero.update(times(1.0, 11.0, 3.5))
    values = {key: value.item() for key, value in zero.compute().items()}
    assert (values["forward_min_ms"], values["forward_max_ms"]) == (1.0, 4.0)
    assert values["forward_ms"] == pytest.approx(22 / 7)
    assert values["forward_slowest_rank"] == 1
    assert values["step_min_ms"] == values["step_max_ms"] == 12.0
    assert (values["local_min_ms"], values["local_max_ms"]) == (8.5, 11.5)
    assert (
        values["slowest_rank"] == 1
    )  # by 1.5 ms of 12: the median of the others lies between them
    # The states are this rank's own again.
    assert zero.counts.shape == (18,)
    zero.update(times(1.0, 11.0, 3.5))
    assert zero.compute()["forward_ms"].item() == pytest.approx(23 / 8)


def test_metric_without_sync_is_of_this_rank() -> None:
    other = PhaseTimeMetric()
    other.update(times(9.0))
    metric = PhaseTimeMetric(
        sync_on_compute=False, dist_sync_fn=gathers(other), distributed_available_fn=lambda: True
    )
    metric.update(times(3.0))
    assert metric.compute()["forward_max_ms"].item() == 3.0


def test_metric_forward_adds_a_step_once() -> None:
    metric = PhaseTimeMetric()
    assert metric(times(3.0))["forward_ms"].item() == 3.0
    assert metric(times(5.0))["forward_ms"].item() == 5.0
    assert metric.compute()["forward_ms"].item() == 4.0


def test_metric_works_in_a_plain_loop_and_in_a_collection(gpu: FakeGPU) -> None:
    loop = Loop(gpu)
    collection = MetricCollection({"phases": PhaseTimeMetric(), "again": PhaseTimeMetric()})
    train(loop, 5, observers=[collection])
    values = collection.compute()
    assert values["phases_forward_ms"].item() == 4.0
    assert values["again_backward_ms"].item() == 8.0
    mixed = MetricCollection({"phases": PhaseTimeMetric(), "loss": MeanMetric()})
    mixed["phases"].update(times(3.0))
    mixed["loss"].update(1.0)
    assert mixed.compute()["step_ms"].item() == 11.0


def test_metric_continues_from_a_checkpoint() -> None:
    metric = PhaseTimeMetric()
    metric.update(times(3.0))
    state = metric.state_dict()
    resumed = PhaseTimeMetric()
    resumed.load_state_dict(state)
    resumed.update(times(5.0))
    assert resumed.compute()["forward_ms"].item() == 4.0
    assert metric.compute()["forward_ms"].item() == 3.0
    with pytest.raises(ValueError, match="the checkpoint has 16 phases, and the metric 1"):
        PhaseTimeMetric(["forward"]).load_state_dict(metric.state_dict())


def test_metric_counts_custom_phases_if_they_are_named(caplog: pytest.LogCaptureFixture) -> None:
    step = StepTimes(step=0, phase_ms={"augment": 1.0}, host_ms={}, host_wait_ms=0.0, step_ms=1.0)
    metric = PhaseTimeMetric()
    metric.update(step)
    metric.update(step)
    assert caplog.text.count("Phases ['augment'] are not counted by the metric") == 1
    assert "augment_ms" not in metric.compute()
    assert metric.compute()["step_ms"].item() == 1.0
    metric = PhaseTimeMetric(["augment"])
    metric.update(step)
    assert metric.compute()["augment_ms"].item() == 1.0
    with pytest.raises(ValueError, match="phases must be a list of names"):
        PhaseTimeMetric("forward")


def test_metric_adds_a_million_steps_exactly() -> None:
    metric = PhaseTimeMetric()
    metric.to(torch.bfloat16).half()
    metric.sums_ms = metric.sums_ms + 1e9
    before = metric.sums_ms.clone()
    metric.update(times(0.001, 0.001))
    assert (metric.sums_ms - before).max().item() == pytest.approx(0.002, rel=1e-3)


def test_timer_with_a_metric_can_be_copied_to_other_processes(gpu: FakeGPU) -> None:
    timer = pickle.loads(pickle.dumps(GPUPhaseTimer(observers=[PhaseTimeMetric()])))
    [metric] = timer._options.observers
    assert isinstance(metric, PhaseTimeMetric)


def test_metric_states_stay_on_the_host_in_their_precision() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.metric = PhaseTimeMetric()

    holder = Holder().to("meta", torch.bfloat16)
    holder.metric.update(times(3.0))
    assert holder.metric.sums_ms.device.type == "cpu"
    assert holder.metric.sums_ms.dtype == torch.float64


def test_metric_continues_after_a_reset_in_an_evaluation() -> None:
    metric = PhaseTimeMetric()
    with torch.inference_mode():
        metric.update(times(1.0))
        metric.reset()
    metric.update(times(3.0))
    assert metric.compute()["forward_ms"].item() == 3.0
