"""Sub-phases: the share of a module in `forward` and `backward`."""

from typing import Any

import pytest
import torch
from conftest import installed
from fake_gpu import Adder, FakeGPU, Layer, batches, work
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, phase


class Net(nn.Module):
    """A body of 1 + 2 ms, 0.5 ms of glue, and a head of 4 ms; backward takes twice as long."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu
        self.body = nn.Sequential(Layer(gpu, 1.0, 2.0), Layer(gpu, 2.0, 4.0))
        self.head = Layer(gpu, 4.0, 8.0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(work(self.body(x), self.gpu, 0.5, 1.0))
        return result


FORWARD = {"forward": 7.5, "forward/body": 3.0, "forward/head": 4.0}
BACKWARD = {"backward": 15.0, "backward/body": 6.0, "backward/head": 8.0}


def train(gpu: FakeGPU, model: nn.Module, modules: Any, call: Any = None) -> list[dict[str, float]]:
    optimizer = Adder(model.parameters(), gpu, 2.0)
    bare = installed(*model.modules())
    timer = GPUPhaseHooks(model, optimizer, _clock=gpu, modules=modules, _lag=0)
    found = []
    with timer:
        for x in timer.steps(batches(gpu, 3)):
            (call or model)(x).sum().backward()
            optimizer.step()
            timer.flush()
        timer.flush()
    for record in timer._results._copy()[0]:
        times = record.times()
        names = ("forward", "backward")
        found.append({k: v for k, v in times.phase_ms.items() if k.startswith(names)})
    assert installed(*model.modules()) == bare
    return found


def test_forward_and_backward_are_split_and_parents_stay_sums(gpu: FakeGPU) -> None:
    assert train(gpu, Net(gpu), ["body", "head"]) == [{**FORWARD, **BACKWARD}] * 3


def test_the_labels_of_steps_that_are_alike_are_kept_once(gpu: FakeGPU) -> None:
    model = Net(gpu)
    timer = GPUPhaseHooks(model, Adder(model.parameters(), gpu, 2.0), _clock=gpu, modules="all")
    with timer:
        for x in timer.steps(batches(gpu, 4)):
            model(x).sum().backward()
    _, second, *others = timer._results._newest
    assert "forward/body/body.0" in second.labels
    assert [step.labels is second.labels for step in others] == [True, True]


def test_parts_can_be_given_by_name(gpu: FakeGPU) -> None:
    found = train(gpu, Net(gpu), ["body.0"])
    expected = {"forward": 7.5, "backward": 15.0, "forward/body.0": 1.0, "backward/body.0": 2.0}
    assert found == [expected] * 3


def test_a_part_inside_a_part_counts_for_both(gpu: FakeGPU) -> None:
    found = train(gpu, Net(gpu), ["body", "body.1"])
    assert found[0]["forward/body"] == 3.0
    assert found[0]["forward/body/body.1"] == 2.0
    assert found[0]["backward/body"] == 6.0
    assert found[0]["backward/body/body.1"] == 4.0


def test_a_part_that_is_called_several_times_is_the_sum(gpu: FakeGPU) -> None:
    model = Net(gpu)
    found = train(gpu, model, ["head"], call=lambda x: model.head(model(x)))
    assert found[0]["forward/head"] == 8.0
    assert found[0]["backward/head"] == 16.0


def test_checkpointed_parts_are_recomputed_in_backward(gpu: FakeGPU) -> None:
    model = Net(gpu)

    def call(x: Tensor) -> Tensor:
        hidden = checkpoint(model.body, x.requires_grad_(), use_reentrant=False)
        result: Tensor = model.head(hidden)
        return result

    [first, *_] = train(gpu, model, ["body", "head"], call=call)
    assert first["forward/body"] == 3.0
    assert first["backward/head"] == 8.0
    assert first["backward/body"] == 9.0


def test_no_hook_is_left_on_an_input_that_needs_a_gradient(gpu: FakeGPU) -> None:
    model = Net(gpu)
    x = torch.ones(1, 2, requires_grad=True)
    train(gpu, model, ["body"], call=lambda _: model(x))
    assert not x._backward_hooks


def test_inside_a_compiled_model_parts_are_absent_which_is_said(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model: Any = torch.compile(net, backend="eager")
    found = train(gpu, model, ["1"])
    assert [set(step) for step in found] == [{"forward", "backward"}] * 3
    assert "inside compiled code, and are not timed apart: 1" in caplog.text
    torch._dynamo.reset()


# Of dynamo's own, about any input that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_part_is_timed(gpu: FakeGPU) -> None:
    torch._dynamo.reset()
    model = Net(gpu)
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    model.head = nn.Sequential(compiled, Layer(gpu, 4.0, 8.0))  # type: ignore[assignment]
    assert {"forward/head.0", "backward/head.0"} < set(train(gpu, model, ["head.0"])[0])
    torch._dynamo.reset()


def test_an_unknown_part_is_refused_with_those_that_there_are(gpu: FakeGPU) -> None:
    with pytest.raises(ValueError, match="the model has no module 'tail'; it has body, head"):
        GPUPhaseHooks(Net(gpu), modules=["tail"])


class Chain(nn.Module):
    """An embedding of 10 ms in backward, glue of 100, and a body of 2 + 4."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu
        self.emb = Layer(gpu, 1.0, 10.0)
        self.body = nn.Sequential(Layer(gpu, 1.0, 2.0), Layer(gpu, 1.0, 4.0))
        self.drop = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = work(self.emb(x), self.gpu, 1.0, 100.0)
        result: Tensor = self.body(self.drop(x))
        return result


def test_a_part_that_begins_with_the_part_around_it_ends_with_it_in_backward(gpu: FakeGPU) -> None:
    [first, *_] = train(gpu, Chain(gpu), ["body", "body.0"])
    assert first["backward/body"] == 6.0
    assert first["backward/body/body.0"] == 2.0
    assert first["backward"] == 116.0


def test_a_part_that_returns_its_input_has_no_backward(gpu: FakeGPU) -> None:
    [first, *_] = train(gpu, Chain(gpu), ["drop", "body"])
    assert first["forward/drop"] == 0.0
    assert first["backward/body"] == 6.0
    assert "backward/drop" not in first


def test_inputs_by_keyword_end_a_part_too(gpu: FakeGPU) -> None:
    class Keyword(Chain):
        def forward(self, x: Tensor) -> Tensor:
            hidden = work(self.emb(x), self.gpu, 1.0, 100.0)
            result: Tensor = self.body(input=hidden)
            return result

    [first, *_] = train(gpu, Keyword(gpu), ["body"])
    assert first["backward/body"] == 6.0


def test_a_part_inside_a_phase_by_hand_does_not_upset_the_part_around_it(gpu: FakeGPU) -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer(gpu, 1.0, 2.0)

        def forward(self, x: Tensor) -> Tensor:
            with phase("augment"):
                x = self.inner(x)
            return work(x, gpu, 3.0, 6.0)

    model = Chain(gpu)
    model.body = Body()  # type: ignore[assignment]
    [first, *_] = train(gpu, model, ["body", "body.inner"])
    assert first["forward/body"] == 3.0
    assert first["backward/body"] == 8.0


def test_parts_work_with_a_backward_that_is_named_by_hand(gpu: FakeGPU) -> None:
    model = Net(gpu)
    with GPUPhaseHooks(model, _clock=gpu, modules=["head"], wrap_backward=False) as timer:
        for x in timer.steps(batches(gpu, 2)):
            loss = model(x).sum()
            with timer.phase("backward"):
                loss.backward()
    assert timer._results._copy()[0][0].times().phase_ms["backward/head"] == 8.0


@pytest.mark.parametrize("modules", [{"x": nn.Linear(1, 1)}, [1], True, 1.5, {"body"}, "a/b"])
def test_what_names_no_modules_is_refused_in_the_constructor(gpu: FakeGPU, modules: Any) -> None:
    with pytest.raises(TypeError, match="modules must be a depth such as 2, 'all', a dotted name"):
        GPUPhaseHooks(Net(gpu), modules=modules)
    with pytest.raises(TypeError, match="modules must be a depth such as 2, 'all', a dotted name"):
        GPUPhaseTimer(modules=modules)


def test_an_annotator_that_fails_does_not_reach_the_loop(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_gputime._record.recorder.Annotator.__call__", lambda *_: 1 / 0)
    model = Net(gpu)
    with GPUPhaseHooks(model, _clock=gpu, annotate=True) as timer:
        for x in timer.steps(batches(gpu, 3)):
            model(x)
    assert len(timer.history()) == 3
    assert caplog.text.count("no longer shown in other profilers") == 1


def test_phases_are_ranges_in_the_profiler_by_option(gpu: FakeGPU) -> None:
    model = Net(gpu)
    optimizer = Adder(model.parameters(), gpu, 2.0)
    with (
        torch.profiler.profile() as profiler,
        GPUPhaseHooks(model, optimizer, _clock=gpu, annotate=True) as timer,
    ):
        for x in timer.steps(batches(gpu, 2)):
            model(x).sum().backward()
            optimizer.step()
    names = [event.name for event in profiler.events() or ()]
    for name in ("data", "forward", "loss", "backward", "optimizer", "other"):
        assert names.count(f"phase/{name}") >= 2, name
