import copy
import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from conftest import AUTOGRAD, hooks_of, installed
from fake_gpu import Adder, FakeGPU, Layer, Loss, work
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gputime._boundaries.boundaries import Boundaries
from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._record.recorder import Recorder


class Timed:
    """Marks of a model and its optimizer, one step at a time."""

    def __init__(self, gpu: FakeGPU, model: nn.Module, *optimizers: Any, **options: Any) -> None:
        self.steps: list[dict[str, float]] = []
        self.recorder = Recorder(
            gpu,
            lag=0,
            emit=lambda steps: self.steps.extend(dict(s.times().phase_ms) for s in steps),
        )
        self.boundaries = Boundaries(self.recorder, Loop(model, optimizers, **options))
        self.boundaries.attach()
        self.recorder.begin("other")

    def end_step(self) -> dict[str, float]:
        self.recorder.end_step(0)
        self.boundaries.step_ended()
        self.recorder.begin("other")
        return {name: ms for name, ms in self.steps[-1].items() if ms}


@pytest.fixture
def x() -> Tensor:
    return torch.ones(1, 2)


@pytest.fixture
def time_step() -> Iterator[Callable[..., Timed]]:
    made: list[Timed] = []

    def make(*args: Any, **options: Any) -> Timed:
        made.append(Timed(*args, **options))
        return made[-1]

    yield make
    for timed in made:
        timed.boundaries.remove()
        timed.boundaries.remove()


def test_a_standard_step(gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]) -> None:
    model = Layer(gpu, 3.0, 7.0)
    optimizer = Adder(model.parameters(), gpu, 2.0)
    timed = time_step(gpu, model, optimizer)
    gpu.work(1.0)
    loss = work(model(x), gpu, 0.5, 0.25).sum()
    optimizer.zero_grad()
    gpu.work(0.125)
    loss.backward()
    gpu.work(4.0)  # clipping
    optimizer.step()
    gpu.work(1.0)
    assert timed.end_step() == {
        "other": 2.125,
        "forward": 3.0,
        "loss": 0.5,
        "backward": 7.25,
        "optimizer": 6.0,
    }


def test_only_the_outermost_call_is_a_boundary(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    model = nn.Sequential(Layer(gpu, 1.0), nn.Sequential(Layer(gpu, 2.0), Layer(gpu, 4.0)))
    timed = time_step(gpu, model)
    before = gpu.created
    model(x)
    gpu.work(8.0)
    assert gpu.created - before == 2
    assert timed.end_step() == {"forward": 7.0, "other": 8.0}


def test_children_are_timed_where_the_model_is_not_called(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Layer(gpu, 1.0)
            self.blocks = nn.ModuleList([Layer(gpu, 2.0), Layer(gpu, 4.0)])
            self.heads = nn.ModuleDict({"a": Layer(gpu, 8.0)})

    model = Holder()
    timed = time_step(gpu, model)
    x = model.encoder(x)
    gpu.work(16.0)  # between two model calls
    for block in model.blocks:
        x = block(x)
    x = model.heads["a"](x)
    gpu.work(0.5)
    x.sum().backward()
    assert timed.end_step() == {"forward": 31.0, "loss": 0.5}


def test_children_that_the_model_call_covers_lose_their_hooks(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    model = nn.Sequential(*(Layer(gpu, 1.0) for _ in range(10)))
    bare = installed(*model)
    timed = time_step(gpu, model)
    assert installed(*model) != bare
    model(x)
    assert timed.end_step() == {"forward": 10.0}
    assert installed(*model) == bare
    model(x)
    assert timed.end_step() == {"forward": 10.0}


def test_children_get_their_hooks_back_when_a_step_has_no_forward_without_them(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    model = nn.Sequential(Layer(gpu, 1.0), Layer(gpu, 2.0))
    timed = time_step(gpu, model)
    model(x)
    timed.end_step()
    model[0](x)
    assert timed.end_step() == {"other": 1.0}
    model[0](x)
    assert timed.end_step() == {"forward": 1.0}


def test_a_child_that_is_called_alone_as_well_keeps_its_hooks(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    model = nn.Sequential(Layer(gpu, 1.0), Layer(gpu, 2.0))
    timed = time_step(gpu, model)
    for _ in range(3):
        model(x)
        gpu.work(8.0)
        model[0](x)
        assert timed.end_step() == {"forward": 12.0}


def test_losses_and_metrics_are_no_model_calls(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    class Count(torchmetrics.SumMetric):
        full_state_update = False  # So that a call of the metric is one update.

        def update(self, value: Any) -> None:
            gpu.work(4.0)
            super().update(value)

    model = nn.ModuleDict(
        {
            "net": Layer(gpu, 1.0),
            "loss": Loss(gpu, 2.0),
            "metrics": torchmetrics.MetricCollection([Count()]),
        }
    )
    timed = time_step(gpu, model)
    loss = model["loss"](model["net"](x), x)
    model["metrics"](loss.detach())
    loss.backward()
    assert timed.end_step() == {"forward": 1.0, "loss": 6.0}


def test_a_loss_module_between_two_model_calls_is_loss(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    model = nn.ModuleDict({"net": Layer(gpu, 1.0), "loss": Loss(gpu, 2.0)})
    timed = time_step(gpu, model)
    total = model["loss"](model["net"](x), x)
    total = total + model["loss"](model["net"](x), x)
    total.backward()
    assert timed.end_step() == {"forward": 2.0, "loss": 4.0}


def test_a_model_call_that_raises_ends(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gpu.work(1.0)
            raise KeyError

    model = nn.ModuleDict({"fails": Fails(), "net": Layer(gpu, 2.0)})
    timed = time_step(gpu, model)
    with pytest.raises(KeyError):
        model["fails"](x)
    gpu.work(4.0)
    model["net"](x)
    gpu.work(8.0)
    assert timed.end_step() == {"forward": 7.0, "other": 8.0}


def test_a_wrapper_that_runs_the_training_step_through_the_model_is_no_model_call(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Layer(gpu, 2.0)
            self.redirect = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.redirect:
                result: Tensor = self.net(x)
                return result
            self.redirect = False
            gpu.work(1.0)
            loss = work(self(x), gpu, 4.0)
            gpu.work(0.5)
            return loss

    model = Model()
    wrapper = nn.Sequential(model)
    timed = time_step(gpu, model, wrapper=wrapper)
    for _ in range(3):
        model.redirect = True
        wrapper(x).sum().backward()
        assert timed.end_step() == {"other": 1.0, "forward": 2.0, "loss": 4.5}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_of_a_checkpointed_layer_is_backward(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed], use_reentrant: bool
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(gpu, 2.0, 3.0)

    model = Model()
    timed = time_step(gpu, model)
    x.requires_grad_()
    for _ in range(3):
        out = checkpoint(model.layer, x, use_reentrant=use_reentrant)
        gpu.work(0.5)
        out.sum().backward()
        assert timed.end_step() == {"forward": 2.0, "loss": 0.5, "backward": 5.0}


def test_every_way_to_call_backward_is_seen(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    model = Layer(gpu, 1.0, 2.0)
    timed = time_step(gpu, model)
    model(x).sum().backward()
    torch.autograd.backward(model(x).sum())
    torch.autograd.backward([model(x).sum()], retain_graph=True)
    assert timed.end_step()["backward"] == 6.0


def test_backward_can_be_left_alone(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    before = AUTOGRAD._engine_run_backward
    model = Layer(gpu, 1.0, 2.0)
    timed = time_step(gpu, model, wrap_backward=False)
    assert AUTOGRAD._engine_run_backward is before
    model(x).sum().backward()
    assert timed.end_step() == {"forward": 1.0, "other": 2.0}


def test_timers_come_off_in_any_order(gpu: FakeGPU, x: Tensor) -> None:
    before = AUTOGRAD._engine_run_backward
    model = Layer(gpu, 1.0, 2.0)
    bare = installed(model)
    one, two, three = (Timed(gpu, model) for _ in range(3))
    one.boundaries.remove()
    model(x).sum().backward()
    assert "backward" not in one.end_step()
    assert two.end_step()["backward"] == three.end_step()["backward"] == 2.0
    three.boundaries.remove()
    two.boundaries.remove()
    assert AUTOGRAD._engine_run_backward is before
    assert installed(model) == bare


def test_a_wrapper_of_somebody_else_over_ours_keeps_working(gpu: FakeGPU, x: Tensor) -> None:
    before = AUTOGRAD._engine_run_backward
    model = Layer(gpu, 1.0, 2.0)
    timed = Timed(gpu, model)
    ours = AUTOGRAD._engine_run_backward
    AUTOGRAD._engine_run_backward = theirs = lambda *args, **kwargs: ours(*args, **kwargs)
    timed.boundaries.remove()
    assert AUTOGRAD._engine_run_backward is theirs
    model(x).sum().backward()
    AUTOGRAD._engine_run_backward = before
    assert model.linear.weight.grad is not None
    assert timed.end_step() == {"other": 3.0}


def test_a_backward_that_raises_ends(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    model = Layer(gpu, 1.0, 2.0)
    timed = time_step(gpu, model)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(1).backward()
    gpu.work(1.0)
    model(x).sum().backward()
    assert timed.end_step() == {"other": 1.0, "forward": 1.0, "backward": 2.0}


def test_an_update_without_a_backward_is_optimizer(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    model = Layer(gpu, 1.0)
    optimizer = Adder(model.parameters(), gpu, 2.0)
    timed = time_step(gpu, model, optimizer)
    model(x)
    gpu.work(0.5)
    optimizer.step()
    gpu.work(0.25)
    assert timed.end_step() == {"forward": 1.0, "other": 0.75, "optimizer": 2.0}
    assert timed.boundaries.optimizer.updates == 0


def test_a_closure_is_not_optimizer_and_the_rest_of_the_step_is(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    model = Layer(gpu, 1.0, 4.0)

    class Search(torch.optim.Optimizer):
        def __init__(self, params: Iterator[nn.Parameter]) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> Any:
            for _ in range(3):
                closure()
                gpu.work(2.0)

    optimizer = Search(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = work(model(x), gpu, 0.5).sum()
        loss.backward()
        return loss

    timed = time_step(gpu, model, optimizer)
    optimizer.step(closure)
    assert timed.boundaries.optimizer.updates == 1
    assert timed.end_step() == {"forward": 3.0, "loss": 1.5, "backward": 12.0, "optimizer": 6.0}


def test_a_step_that_calls_the_step_of_its_base_is_one_update(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    class Twice(Adder):
        def step(self, closure: Any = None) -> Any:
            super().step()
            gpu.work(8.0)

    model = Layer(gpu, 1.0, 2.0)
    optimizer = Twice(model.parameters(), gpu, 2.0)
    timed = time_step(gpu, model, optimizer)
    model(x).sum().backward()
    optimizer.step()
    assert timed.boundaries.optimizer.updates == 1
    assert timed.end_step()["optimizer"] == 10.0


def test_a_step_that_raises_does_not_spoil_the_next(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    class Fails(Adder):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise KeyError
            gpu.work(2.0)

    model = Layer(gpu, 1.0, 4.0)
    optimizer = Fails(model.parameters(), gpu, 2.0)
    timed = time_step(gpu, model, optimizer)
    with pytest.raises(KeyError):
        optimizer.step()
    timed.end_step()
    optimizer.fails = False
    model(x).sum().backward()
    optimizer.step()
    assert timed.end_step() == {"forward": 1.0, "backward": 4.0, "optimizer": 2.0}


def test_a_copy_of_the_model_is_not_timed(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    model = nn.Sequential(Layer(gpu, 1.0))
    timed = time_step(gpu, model)
    copied = copy.deepcopy(model)
    gpu.work(0.5)
    copied(x)
    assert timed.end_step() == {"other": 1.5}


def saved(thing: object) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def test_the_state_of_a_model_is_saved_as_if_it_were_not_timed(
    gpu: FakeGPU, time_step: Callable[..., Timed]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.register_forward_hook(print)
    bare = saved(model.state_dict())
    time_step(gpu, model, submodules={"linear": model[0]})
    time_step(gpu, model)
    assert saved(model.state_dict()) == bare


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_model_has_no_hook_of_ours(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed], duplicate: Callable[[Any], Any]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for one in (model, torch.fx.symbolic_trace(model)):
        bare = duplicate(one)
        time_step(gpu, one, submodules={"linear": one.get_submodule("0")})
        assert hooks_of(one) != hooks_of(bare)
        copied = duplicate(one)
        assert hooks_of(copied) == hooks_of(bare)
        assert vars(copied).keys() == vars(bare).keys()
        assert torch.equal(copied(x), one(x))


def test_a_model_that_was_saved_while_it_was_timed_is_loaded_where_only_its_classes_are_safe(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    # As pytorch/examples does in `word_language_model`.
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    bare = saved(model)
    time_step(gpu, model)
    file = saved(model)
    assert file == bare
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU]):
        assert torch.equal(torch.load(io.BytesIO(file))(x), model(x))


def test_a_model_with_hooks_of_others_needs_nothing_of_ours_to_be_loaded(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.register_forward_hook(print)
    time_step(gpu, model)
    file = saved(model)
    assert torch.equal(torch.load(io.BytesIO(file), weights_only=False)(x), model(x))
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        [pickled] = [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
    assert b"lightning_gputime" not in pickled


def test_a_copy_keeps_the_hooks_of_others_and_their_handles(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    model = nn.Linear(2, 2)
    model.handle = model.register_forward_hook(lambda *_: torch.zeros(1))  # type: ignore[assignment]
    timed = time_step(gpu, model, submodules={"all": model})
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), torch.zeros(1))
    copied.handle.remove()  # type: ignore[union-attr,operator]
    assert copied(x).shape == (1, 2)
    assert torch.equal(model(x), torch.zeros(1))
    timed.boundaries.remove()
    assert torch.equal(model(x), torch.zeros(1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated.*:DeprecationWarning")
def test_a_model_is_traced_while_it_is_timed(
    gpu: FakeGPU, x: Tensor, time_step: Callable[..., Timed]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    time_step(gpu, model, submodules={"linear": model[0]})
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))


class Keeping(torch.optim.SGD):
    """An optimizer of which a copy gets all attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_an_optimizer_clears_its_own_gradients(
    gpu: FakeGPU, time_step: Callable[..., Timed], duplicate: Callable[[Any], Any]
) -> None:
    model = nn.Linear(2, 2)
    optimizer = Keeping(model.parameters(), lr=0.1)
    timed = time_step(gpu, model, optimizer)
    assert "zero_grad" in vars(optimizer)
    copied = duplicate(optimizer)
    for one in (optimizer, copied):
        one.param_groups[0]["params"][0].grad = torch.ones(2, 2)
    copied.zero_grad()
    assert copied.param_groups[0]["params"][0].grad is None
    assert model.weight.grad is not None
    timed.boundaries.remove()
    optimizer.zero_grad()
    assert model.weight.grad is None


class Unhooked(torch.optim.Optimizer):
    """An optimizer that has no hooks, whose `step` is patched therefore."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self.param_groups = [{"params": [*parameters], "lr": 1.0}]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_a_scheduler_can_be_made_of_an_optimizer_that_is_timed(
    gpu: FakeGPU, time_step: Callable[..., Timed]
) -> None:
    model = nn.Linear(2, 2)
    optimizer = Unhooked(model.parameters())
    time_step(gpu, model, optimizer)
    assert "step" in vars(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()


def test_boundaries_come_off_between_two_steps_and_know_what_they_knew(
    gpu: FakeGPU, x: Tensor
) -> None:
    model = nn.Sequential(Layer(gpu, 3.0, 7.0), nn.Identity())
    optimizer = Adder(model.parameters(), gpu, 2.0)
    things = (model, *model.modules(), optimizer)
    before, bare = AUTOGRAD._engine_run_backward, installed(*things)
    timed = Timed(gpu, model, optimizer, submodules={"layer": model[0]})

    def step() -> dict[str, float]:
        work(model(x), gpu, 0.5, 0.25).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return timed.end_step()

    expected = step()
    known = installed(*things)
    for _ in range(3):
        timed.boundaries.suspend()
        timed.boundaries.suspend()
        assert installed(*things) == bare
        assert AUTOGRAD._engine_run_backward is before
        assert set(step()) == {"other"}
        timed.boundaries.reattach()
        timed.boundaries.reattach()
        assert [{*one} for one in installed(*things)] == [{*one} for one in known]
        assert step() == expected
    timed.boundaries.suspend()
    timed.boundaries.remove()
    assert installed(*things) == bare


def test_what_others_replaced_while_boundaries_were_off_is_called(gpu: FakeGPU, x: Tensor) -> None:
    model = Layer(gpu, 1.0, 2.0)
    optimizer = Adder(model.parameters(), gpu, 2.0)
    before, calls = AUTOGRAD._engine_run_backward, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return inner(*args, **kwargs)

    timed = Timed(gpu, model, optimizer)
    inner = AUTOGRAD._engine_run_backward
    timed.boundaries.suspend()
    # It knew ours, which is inside of it, and outside again.
    AUTOGRAD._engine_run_backward = theirs
    timed.boundaries.reattach()
    model(x).sum().backward()
    assert len(calls) == 1
    assert timed.end_step()["backward"] == 2.0
    timed.boundaries.remove()
    assert AUTOGRAD._engine_run_backward is theirs
    AUTOGRAD._engine_run_backward = before


def test_nothing_is_left_on_the_model_and_the_optimizer(gpu: FakeGPU, x: Tensor) -> None:
    model = nn.Sequential(Layer(gpu, 1.0, 2.0), Layer(gpu, 1.0, 2.0))
    optimizer = Adder(model.parameters(), gpu, 2.0)
    things = (model, *model.modules(), optimizer)
    bare = installed(*things)
    timed = Timed(gpu, model, optimizer)
    assert installed(*things) != bare
    model(x).sum().backward()
    optimizer.step()
    timed.end_step()
    timed.boundaries.remove()
    assert installed(*things) == bare
