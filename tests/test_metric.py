"""`PhaseTimeMetric`: alone, in collections, across ranks, and from a checkpoint."""

import pickle
from typing import Any

import pytest
import torch
from fake_loop import Loop, train
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection

from lightning_gputime import GPUPhaseTimer, PhaseTimeMetric, StepTimes


def times(forward_ms: float, backward_ms: float = 8.0, **more_ms: float) -> StepTimes:
    phase_ms = {"forward": forward_ms, "backward": backward_ms, **more_ms}
    return StepTimes(0, phase_ms, host_ms={}, host_wait_ms=0.0, step_ms=forward_ms + backward_ms)


def metric_of(*steps: StepTimes, **options: Any) -> PhaseTimeMetric:
    metric = PhaseTimeMetric(**options)
    for step in steps:
        metric.update(step)
    return metric


def values_of(metric: PhaseTimeMetric | MetricCollection) -> dict[str, float]:
    return {key: value.item() for key, value in metric.compute().items()}


def gather_from(*others: PhaseTimeMetric) -> Any:
    """Return a gather function that appends the states of other ranks' metrics."""
    states = [(metric.sums_ms, metric.counts) for metric in others]

    def gather(tensor: Tensor, group: Any) -> list[Tensor]:
        return [tensor, *(state[0 if tensor.is_floating_point() else 1] for state in states)]

    return gather


def test_metric_is_the_mean_over_the_steps_since_its_reset() -> None:
    metric = PhaseTimeMetric()
    # Calling a metric adds a step once, and returns its value for this step.
    assert [metric(times(ms))["forward_ms"].item() for ms in (3.0, 5.0)] == [3.0, 5.0]
    values = values_of(metric)
    assert values["forward_ms"] == 4.0
    assert values["step_ms"] == values["local_ms"] == 12.0
    assert values["straggler"] == -1
    assert "data_ms" not in values
    with torch.inference_mode():  # Like a reset in an evaluation.
        metric.reset()
    with pytest.warns(UserWarning, match="called before the ``update``"):
        assert metric.compute() == {}
    metric.update(times(3.0))
    assert values_of(metric)["forward_ms"] == 3.0


def test_metric_has_bounds_over_ranks_and_the_straggler() -> None:
    fast = times(1.0, 11.0, **{"backward/comm": 3.5})
    slow = [times(4.0, 8.0, **{"backward/comm": 0.5})] * 3
    gather = gather_from(metric_of(*slow), metric_of(*slow[:2]))
    rank_0 = metric_of(fast, fast, dist_sync_fn=gather, distributed_available_fn=lambda: True)
    values = values_of(rank_0)
    assert (values["forward_min_ms"], values["forward_max_ms"]) == (1.0, 4.0)
    assert values["forward_ms"] == pytest.approx(22 / 7)
    assert values["forward_max_rank"] == 1
    assert values["step_min_ms"] == values["step_max_ms"] == 12.0
    assert (values["local_min_ms"], values["local_max_ms"]) == (8.5, 11.5)
    # The local time of rank 1 is 11.5 ms, and the median of the other ranks 10 ms.
    assert values["straggler"] == 1
    # After `compute`, the metric only has the states of this rank again.
    assert rank_0.counts.shape == (18,)
    rank_0.update(fast)
    assert values_of(rank_0)["forward_ms"] == pytest.approx(23 / 8)


def test_metric_without_sync_has_only_this_rank() -> None:
    options = {"dist_sync_fn": gather_from(metric_of(times(9.0))), "sync_on_compute": False}
    metric = metric_of(times(3.0), distributed_available_fn=lambda: True, **options)
    assert values_of(metric)["forward_max_ms"] == 3.0


def test_metric_works_in_a_plain_loop_and_in_a_collection(loop: Loop) -> None:
    collection = MetricCollection({"phases": PhaseTimeMetric(), "again": PhaseTimeMetric()})
    train(loop, 5, observers=[collection])
    values = values_of(collection)
    assert (values["phases_forward_ms"], values["again_backward_ms"]) == (4.0, 8.0)
    mixed = MetricCollection({"phases": PhaseTimeMetric(), "loss": MeanMetric()})
    mixed["phases"].update(times(3.0))
    mixed["loss"].update(1.0)
    assert values_of(mixed)["step_ms"] == 11.0


def test_metric_continues_from_a_checkpoint() -> None:
    metric, resumed = metric_of(times(3.0)), PhaseTimeMetric()
    resumed.load_state_dict(metric.state_dict())
    resumed.update(times(5.0))
    assert values_of(resumed)["forward_ms"] == 4.0
    assert values_of(metric)["forward_ms"] == 3.0
    many = metric_of(*(times(3.0 + number % 2) for number in range(80)))
    resumed = PhaseTimeMetric()
    resumed.load_state_dict(many.state_dict())
    resumed.update(times(3.0))
    # The noise of the checkpoint, because one step shows none.
    assert resumed.sums_ms[-1] == many.sums_ms[-1] > 0.0
    with pytest.raises(ValueError, match="the checkpoint has 16 phases, but the metric has 1"):
        PhaseTimeMetric(["forward"]).load_state_dict(metric.state_dict())


def test_metric_counts_custom_phases_if_they_are_named(caplog: pytest.LogCaptureFixture) -> None:
    step = StepTimes(0, {"augment": 1.0}, host_ms={}, host_wait_ms=0.0, step_ms=1.0)
    values = values_of(metric_of(step, step))
    assert caplog.text.count("Phases ['augment'] are not counted by the metric") == 1
    assert "augment_ms" not in values
    assert values["step_ms"] == 1.0
    assert values_of(metric_of(step, phases=["augment"]))["augment_ms"] == 1.0
    with pytest.raises(ValueError, match="phases must be a list of names"):
        PhaseTimeMetric("forward")


def test_timer_with_a_metric_can_be_pickled() -> None:
    timer = pickle.loads(pickle.dumps(GPUPhaseTimer(observers=[PhaseTimeMetric()])))
    [metric] = timer._options.observers
    assert isinstance(metric, PhaseTimeMetric)


def test_metric_states_stay_on_the_host_in_double_precision() -> None:
    holder = torch.nn.ModuleDict({"metric": PhaseTimeMetric()}).to("meta", torch.bfloat16).half()
    metric: Any = holder["metric"]
    metric.sums_ms = metric.sums_ms + 1e9  # A short step is added to a large sum accurately.
    before = metric.sums_ms.clone()
    metric.update(times(0.001, 0.001))
    assert (metric.sums_ms.device.type, metric.sums_ms.dtype) == ("cpu", torch.float64)
    assert (metric.sums_ms - before).max().item() == pytest.approx(0.002, rel=1e-3)
