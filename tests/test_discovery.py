"""What a loop calls is found out: models and losses of any kind, optimizers of any origin."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gpu import STEP_MS, Adder, FakeGPU, Layer, steps, work
from fake_lightning import Loader, Model, fit, trainer
from fake_loop import Loop, hooks
from torch import Tensor, nn
from torch.autograd import backward as imported_backward
from torch.utils.checkpoint import checkpoint

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, phase


class Net(nn.Module):
    """A model whose parts are called, and not it."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu
        self.backbone = nn.Module()
        self.backbone.features = nn.Sequential(Layer(gpu, 1.0, 2.0), Layer(gpu, 2.0, 3.0))
        self.head = Layer(gpu, 1.0, 2.75)

    def encode(self, x: Tensor) -> Tensor:
        features: Tensor = self.backbone.features(x)  # type: ignore[operator]
        return features


class OwnLoss(nn.Module):
    """A loss that is no loss of torch's."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def forward(self, x: Tensor) -> Tensor:
        return work(x, self.gpu, 0.5, 0.25).sum()


def train(
    gpu: FakeGPU,
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    n: int = 3,
    backward: Callable[[Tensor], Any] = lambda loss: loss.backward(),
    **options: Any,
) -> GPUPhaseHooks:
    optimizer = Adder(iter([*model.parameters()]), gpu, 2.0)
    options = {"warmup_steps": 0, **options}
    with GPUPhaseHooks(model, optimizer, _clock=gpu, **options) as timer:
        for x in timer.steps(Loader(gpu, n)):
            gpu.work(0.125)
            backward(loss_of(x))
            optimizer.step()
    return timer


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a part of a part": lambda net, x: net.head(net.backbone.features(x)),
    "a method": lambda net, x: net.head(net.encode(x)),
    "forward itself": lambda net, x: net.head(net.backbone.features.forward(x)),
}


@pytest.mark.parametrize("how", CALLS)
def test_a_part_of_the_model_is_found_however_it_is_called(gpu: FakeGPU, how: str) -> None:
    net, loss = Net(gpu), OwnLoss(gpu)
    timer = train(gpu, net, lambda x: loss(CALLS[how](net, x)))
    assert steps(timer) == [STEP_MS] * 3


def test_only_the_modules_that_the_loop_calls_keep_their_hooks(gpu: FakeGPU) -> None:
    net, loss = Net(gpu), OwnLoss(gpu)
    hooked = []

    def loss_of(x: Tensor) -> Tensor:
        hooked.append(sum(bool(module._forward_pre_hooks) for module in net.modules()))
        return loss(CALLS["a method"](net, x))  # type: ignore[no-any-return]

    train(gpu, net, loss_of)
    # The net, the features and the head; what is inside the features was called by them alone.
    everything = sum(1 for _ in net.modules())
    inside = sum(1 for module in net.modules() for _ in module.children()) + 1
    assert everything == inside
    assert hooked[0] == everything
    called = {net.backbone.features, net.head}
    never = {net, net.backbone}
    assert hooked[1:] == [len(called) + len(never)] * 2


@pytest.mark.parametrize("every_n_steps", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_loss_module_of_ones_own_is_loss(gpu: FakeGPU, scale: float, every_n_steps: int) -> None:
    model = nn.ModuleDict({"net": Layer(gpu, 4.0, 7.75), "criterion": OwnLoss(gpu)})
    timer = train(
        gpu,
        model,
        lambda x: scale * model["criterion"](model["net"](x)) + 0.0,
        n=4,
        every_n_steps=every_n_steps,
    )
    assert steps(timer) == [STEP_MS] * (4 // every_n_steps)


def test_a_loss_module_of_ones_own_is_loss_in_lightning(gpu: FakeGPU) -> None:
    class Own(Model):
        def __init__(self) -> None:
            super().__init__(gpu)
            self.criterion = OwnLoss(gpu)

        def loss(self, x: Tensor) -> Tensor:
            return self.criterion(self(x))  # type: ignore[no-any-return]

    assert steps(fit(gpu, Own())) == [STEP_MS] * 3


def test_a_model_that_returns_its_loss_is_forward(gpu: FakeGPU) -> None:
    class WithLoss(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    model = WithLoss(gpu, 4.0, 8.0)
    expected = {**STEP_MS, "loss": 0.0}
    assert steps(train(gpu, model, model)) == [expected] * 3


def test_a_loss_that_is_found_in_an_accumulation_is_loss_in_every_micro_batch(
    gpu: FakeGPU,
) -> None:
    model = nn.ModuleDict({"net": Layer(gpu, 4.0, 7.75), "criterion": OwnLoss(gpu)})
    optimizer = Adder(iter([*model.parameters()]), gpu, 2.0)
    options: Any = {"_clock": gpu, "warmup_steps": 0, "accumulate_grad_batches": 2}
    with GPUPhaseHooks(model, optimizer, **options) as timer:
        for i, x in enumerate(timer.steps(Loader(gpu, 4))):
            gpu.work(0.125)
            model["criterion"](model["net"](x)).backward()
            if i % 2:
                optimizer.step()
    assert [step["loss"] for step in steps(timer)] == [1.0, 1.0]
    assert [step["forward"] for step in steps(timer)] == [8.0, 8.0]


def test_a_call_that_raised_does_not_hide_the_next_one(gpu: FakeGPU) -> None:
    class Net(nn.ModuleDict):
        def forward(self, x: Tensor) -> Tensor:
            return self["tail"](self["head"](x))  # type: ignore[no-any-return]

    class Fails(Layer):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise KeyError
            return super().forward(x)

    tail = Fails(gpu, 1.0, 2.75)
    model, loss = Net({"head": Layer(gpu, 3.0, 5.0), "tail": tail}), OwnLoss(gpu)

    def loss_of(x: Tensor) -> Tensor:
        tail.fails = True
        with pytest.raises(KeyError):
            model(x)
        tail.fails = False
        gpu.work(1.0)
        return loss(model(x))  # type: ignore[no-any-return]

    assert steps(train(gpu, model, loss_of)) == [{**STEP_MS, "forward": 3.0 + 1.0 + 4.0}] * 3


def test_a_module_that_calls_itself_is_one_call(gpu: FakeGPU) -> None:
    class Tree(Layer):
        def forward(self, x: Tensor, depth: int = 1) -> Tensor:
            if depth:
                x = self(x, depth - 1)
                self._times[0].work(1.0)
            return super().forward(x)

    model, loss = Tree(gpu, 1.5, 3.875), OwnLoss(gpu)
    assert steps(train(gpu, model, lambda x: loss(model(x)))) == [STEP_MS] * 3


def test_a_teacher_in_eval_mode_keeps_the_fast_path_of_its_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast: Any = torch._transformer_encoder_layer_fwd
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return fast(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    teacher = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    model = nn.ModuleDict({"teacher": teacher, "student": nn.Linear(16, 16)})
    optimizer = torch.optim.SGD(model["student"].parameters())
    x = torch.randn(4, 8, 16)
    with GPUPhaseHooks(model, optimizer) as timer:
        for _ in timer.steps(range(3)):
            with torch.no_grad():
                target = teacher(x)
            (model["student"](x) - target).square().mean().backward()
            optimizer.step()
    assert len(calls) == 2 * 3


def test_a_model_of_layers_with_a_fast_path_is_found_all_the_same(gpu: FakeGPU) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0, batch_first=True)

    model, loss = Layers(), OwnLoss(gpu)
    timer = train(gpu, model, lambda x: loss(work(model.layer(x.unsqueeze(0)), gpu, 4.0, 7.75)))
    assert ["forward" in step for step in steps(timer)] == [False, True, True]


# Scripted and traced modules


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated.*:DeprecationWarning")
@pytest.mark.parametrize("how", ["scripted", "traced"])
def test_a_scripted_or_traced_child_is_timed_and_left_as_it_was(how: str) -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    child: Any = torch.jit.script(inner) if how == "scripted" else None
    child = child or torch.jit.trace(inner, torch.ones(1, 2))
    model = nn.ModuleDict({"child": child, "head": nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(model.parameters())
    with GPUPhaseHooks(model, optimizer, warmup_steps=0) as timer:
        for x in timer.steps([torch.ones(1, 2)] * 3):
            model["head"](model["child"](x)).sum().backward()
            optimizer.step()
    assert [set(step) for step in steps(timer)] == [
        {"data", "other", "forward", "loss", "backward", "optimizer"}
    ] * 3
    assert not any(module._forward_pre_hooks for module in (model, child, model["head"]))


# Optimizers


class Wrapper(torch.optim.Optimizer):
    """A wrapper in the style of SAM's: an optimizer of its own around another one."""

    def __init__(self, gpu: FakeGPU, base: torch.optim.Optimizer) -> None:
        self.gpu, self.base_optimizer = gpu, base
        super().__init__(base.param_groups, {})

    def first_step(self) -> None:
        self.gpu.work(1.0)

    def second_step(self) -> None:
        self.base_optimizer.step()


def test_the_updates_of_sam_are_steps_of_a_manual_optimization(gpu: FakeGPU) -> None:
    class Sam(Model):
        def __init__(self) -> None:
            super().__init__(gpu)
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            gpu.work(0.125)
            self.manual_backward(self.loss(batch))
            optimizer.first_step()
            self.manual_backward(self.loss(batch))
            optimizer.second_step()

        def configure_optimizers(self) -> Any:
            return Wrapper(gpu, Adder(self.parameters(), gpu, 2.0))

    expected = {**STEP_MS, "forward": 8.0, "loss": 1.0, "backward": 16.0, "other": 1.125}
    timer = fit(gpu, Sam())
    assert steps(timer) == [expected] * 3
    assert timer.summary().skipped_updates == 0


@pytest.mark.parametrize("when", ["later", "replaced"])
def test_an_optimizer_that_is_made_later_is_timed(loop: Loop, when: str) -> None:
    given = loop.optimizer
    with hooks(loop) as timer:
        for i, x in enumerate(timer.steps(loop.batches(4))):
            if i == 2 or when == "later":
                loop.optimizer = Adder(loop.model.parameters(), loop.gpu, 2.0)
            loop.train(x)
    assert loop.optimizer is not given
    assert steps(timer) == [STEP_MS] * 4
    assert timer.summary().skipped_updates == 0


def test_the_optimizer_of_another_model_is_not_timed(loop: Loop) -> None:
    other = Adder(iter([nn.Parameter(torch.zeros(1))]), loop.gpu, 16.0)
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(3)):
            loop.micro_batch(x)
            loop.update()
            other.step()
    assert steps(timer) == [{**STEP_MS, "other": 16.125}] * 3


def test_an_optimizer_without_hooks_of_its_own_is_timed(loop: Loop) -> None:
    class Averaging(torch.optim.Optimizer):
        """As torch's PostLocalSGDOptimizer, which never calls `super().__init__`."""

        def __init__(self, optim: torch.optim.Optimizer) -> None:
            self.optim = optim
            self.param_groups = optim.param_groups

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.optim.step()
            loop.gpu.work(3.0)

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.optim.zero_grad()

    loop.optimizer = Averaging(loop.optimizer)  # type: ignore[assignment]
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(3)):
            loop.train(x)
    assert steps(timer) == [{**STEP_MS, "other": 3.125}] * 3
    assert timer.summary().skipped_updates == 0


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_the_average_behind_an_update_is_optimizer(loop: Loop) -> None:
    from torch.distributed.optim import PostLocalSGDOptimizer

    class Averager:
        def average_parameters(self, params: Any) -> None:
            loop.gpu.work(3.0)

    averager: Any = Averager()
    loop.optimizer = PostLocalSGDOptimizer(loop.optimizer, averager)  # type: ignore[assignment]
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(3)):
            loop.train(x)
    assert steps(timer) == [{**STEP_MS, "optimizer": 5.0}] * 3
    assert "step" not in vars(loop.optimizer)


def test_an_optimizer_of_its_own_without_hooks_is_timed(loop: Loop) -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.param_groups = [{"params": [*loop.model.parameters()]}]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            loop.gpu.work(2.0)

        def zero_grad(self, set_to_none: bool = True) -> None:
            pass

    loop.optimizer = Bare()  # type: ignore[assignment]
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(3)):
            loop.train(x)
    assert steps(timer) == [STEP_MS] * 3
    assert "step" not in vars(loop.optimizer)


def test_updates_inside_the_backward_are_optimizer(gpu: FakeGPU) -> None:
    model, loss = Layer(gpu, 4.0, 7.75), OwnLoss(gpu)
    optimizers = {one: Adder(iter([one]), gpu, 1.0) for one in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
    with GPUPhaseHooks(model, [*optimizers.values()], _clock=gpu, warmup_steps=0) as timer:
        for x in timer.steps(Loader(gpu, 3)):
            gpu.work(0.125)
            loss(model(x)).backward()
    # The weight and the bias.
    assert len(optimizers) == 2
    assert steps(timer) == [STEP_MS] * 3
    assert timer.summary().skipped_updates == 0


# Backward


def by_grad(loop: Loop) -> Callable[[Tensor], None]:
    def backward(loss: Tensor) -> None:
        parameters = [*loop.model.parameters()]
        for one, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            one.grad = grad

    return backward


def test_autograd_grad_as_the_trainings_backward_is_backward(loop: Loop) -> None:
    loss = OwnLoss(loop.gpu)
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(3)):
            loop.gpu.work(0.125)
            by_grad(loop)(loss(loop.model(x)))
            loop.gpu.work(1.0)
            loop.optimizer.step()
    assert steps(timer) == [{**STEP_MS, "optimizer": 3.0}] * 3


def test_gradients_between_two_model_calls_are_backward(loop: Loop) -> None:
    # As in adversarial training: the gradient of the input, then the training itself.
    loss = OwnLoss(loop.gpu)
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(3)):
            loop.gpu.work(0.125)
            x.requires_grad_()
            [grad] = torch.autograd.grad(loss(loop.model(x)), [x])
            loss(loop.model(x + grad.sign())).backward()
            loop.optimizer.step()
    expected = {**STEP_MS, "forward": 8.0, "loss": 1.0, "backward": 16.0}
    assert steps(timer) == [expected] * 3


def test_a_backward_that_was_imported_by_name_is_backward(loop: Loop) -> None:
    loss = OwnLoss(loop.gpu)
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(3)):
            loop.gpu.work(0.125)
            imported_backward([loss(loop.model(x))])
            loop.optimizer.step()
    assert steps(timer) == [STEP_MS] * 3


def test_a_gradient_inside_a_model_call_is_forward(gpu: FakeGPU) -> None:
    class Forces(Layer):
        def forward(self, x: Tensor) -> Tensor:
            x.requires_grad_()
            [force] = torch.autograd.grad(super().forward(x).sum(), [x], create_graph=True)
            return force

    model, loss = Forces(gpu, 1.0, 3.0), OwnLoss(gpu)
    timer = train(gpu, model, lambda x: loss(model(x)))
    assert [step["forward"] for step in steps(timer)] == [4.0] * 3


def test_a_phase_inside_a_checkpointed_block_is_not_forward_when_it_runs_again(
    gpu: FakeGPU,
) -> None:
    class Named(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with phase("forward/block"):
                return super().forward(x)

    block, loss = Named(gpu, 2.0, 1.75), OwnLoss(gpu)
    model = nn.Sequential(Layer(gpu, 2.0, 4.0), block)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Any:
            return checkpoint(model[1], model[0](x), use_reentrant=False)

    whole = Checkpointed()
    timer = train(gpu, whole, lambda x: loss(whole(x)))
    assert steps(timer) == [{**STEP_MS, "forward/block": 2.0}] * 3


def test_lightning_takes_no_update_for_skipped_where_another_optimizer_took_over(
    gpu: FakeGPU,
) -> None:
    class Replaces(GPUPhaseTimer):
        pass

    model = Model(gpu)
    timer = Replaces(_clock=gpu, print_summary=False, warmup_steps=0)
    runner = trainer(timer)

    class Model2(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                runner.strategy.optimizers = [Adder(self.parameters(), gpu, 2.0)]

    model = Model2(gpu)
    runner.fit(model, Loader(gpu, 4))
    assert steps(timer) == [STEP_MS] * 4
    assert timer.summary().skipped_updates == 0
