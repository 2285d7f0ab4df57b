"""Training loops with known times, and the phases that a timer must report for each step.

`test_conformance.py` runs each loop in every front end that can run it. `python
tests/conformance.py` writes the table of loops in `README.md`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchmetrics
from fake_gpu import STEP_MS, Adder, FakeGPU, Layer, Loss, work
from fake_loop import Loop
from torch import Tensor, nn
from torch.autograd import backward as imported_backward
from torch.nn.modules.loss import _Loss
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from lightning_gputime import phase

STEPS, STEP, SAMPLED = "steps()", "step()", "1 of 4 steps timed"
LIGHTNING, TRANSFORMERS = "Lightning", "transformers"
MANUAL, WRAPPED = "manual optimization", "manual optimization with wrapped optimizers"
PLAIN = (STEPS, STEP, SAMPLED)
ALL = (*PLAIN, LIGHTNING)
ALL_AND_TRANSFORMERS = (*ALL, TRANSFORMERS)  # A fit of transformers takes 0.3 s.
BY_HAND = (*PLAIN, MANUAL)
"""Front ends for loop bodies that call backward and the optimizer themselves."""

Phases = dict[str, float]
Build = Callable[[FakeGPU], Loop]
Body = Callable[..., Any]


def loss_of(loop: Loop, x: Tensor) -> Tensor:
    return loop.loss(x)


@dataclass(frozen=True)
class Case:
    """A loop, and the results that a timer must report for it."""

    name: str
    about: str  # The row in the README.
    phases: Phases | list[Phases]  # For all steps, or for each. Phases of zero time are left out.
    front_ends: tuple[str, ...] = ALL
    build: Build = Loop
    body: Body = loss_of  # Takes the loop and a batch, and returns the loss.
    updates: bool = False  # True if the body calls backward and the optimizer.
    arguments: tuple[Any, ...] = ()  # Further arguments of the body.
    batches: int = 3
    micro_batches: int = 1
    lead_ms: float = 0.125  # Before the first model call: `data` with `step()`, else `other`.
    absent: frozenset[str] = frozenset()  # Phases that no step may have, even with zero time.
    options: dict[str, Any] = field(default_factory=dict)  # Options of the timer.
    skipped_updates: int = 0

    def run_body(self, loop: Loop, x: Tensor, number: int) -> Any:
        loop.number = number
        loop.gpu.work(0.125)
        return self.body(loop, x, *self.arguments)


CASES: list[Case] = []


def loss_case(
    phases: Phases | list[Phases],
    front_ends: tuple[str, ...] = ALL,
    each: dict[str, Any] | None = None,
    **options: Any,
) -> Callable[[Body], Body]:
    """Add a case whose body is the decorated function. Its docstring is the row in the README.

    Args:
        phases: Phases of all steps, or of each step.
        front_ends: Front ends that run the case.
        each: Third argument of the body, by the name of a variant. Add a case for each variant.
        **options: Other fields of the case.
    """

    def add(body: Body) -> Body:
        about = str(body.__doc__).strip().removesuffix(".")
        variants = {"": ()} if each is None else {f", {name}": (each[name],) for name in each}
        for name, arguments in variants.items():
            fields = {"body": body, "arguments": arguments, **options}
            CASES.append(Case(f"{body.__name__}{name}", about, phases, front_ends, **fields))
        return body

    return add


def body_case(
    phases: Phases | list[Phases], front_ends: tuple[str, ...] = BY_HAND, **options: Any
) -> Callable[[Body], Body]:
    """Add a case whose body calls backward and the optimizer."""
    return loss_case(phases, front_ends, updates=True, **options)


def times(**phases: float) -> Phases:
    """Return a standard step in which some phases take another time, or are absent (0)."""
    return {name: ms for name, ms in {**STEP_MS, **phases}.items() if ms}


TWICE = times(forward=8.0, loss=1.0, backward=16.0)


def two_micro_batches(phases: Phases) -> Phases:
    """Return the phases of two micro-batches and an update, given the phases of a plain step."""
    return {name: ms if name == "optimizer" else 2 * ms for name, ms in phases.items()}


class Net(nn.Module):
    """A module with given parts, whose forward is a function of the module and its input."""

    def __init__(
        self, gpu: FakeGPU, call: Callable[[Any, Tensor], Any], **parts: nn.Module
    ) -> None:
        super().__init__()
        self.gpu, self.call = gpu, call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def with_model(make: Callable[[FakeGPU], nn.Module]) -> Build:
    return lambda gpu: Loop(gpu, make(gpu))


def with_net(call: Callable[[Any, Tensor], Any], **layers_ms: tuple[float, float]) -> Build:
    """Return a loop with a `Net` of layers, by the times of their forward and backward."""

    def build(gpu: FakeGPU) -> Loop:
        return Loop(
            gpu, Net(gpu, call, **{name: Layer(gpu, *ms) for name, ms in layers_ms.items()})
        )

    return build


def with_optimizer(make: Callable[[Iterator[nn.Parameter], FakeGPU, float], Any]) -> Build:
    def build(gpu: FakeGPU) -> Loop:
        loop = Loop(gpu)
        loop.optimizer = make(loop.model.parameters(), gpu, 2.0)
        return loop

    return build


def with_unknown(make: Callable[[FakeGPU], Any]) -> Build:
    """Return a loop with an object that the timer is not given."""

    def build(gpu: FakeGPU) -> Loop:
        loop = Loop(gpu)
        loop.other = make(gpu)
        return loop

    return build


# Ways to call the model


class Tree(Layer):
    """A module that calls itself."""

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        if depth:
            x = self(x, depth - 1)
            self._times[0].work(1.0)
        return super().forward(x)


class Fails(Layer):
    """A layer that raises at every other call."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.fails = not self.fails
        if self.fails:
            raise KeyError
        return super().forward(x)


def parts(gpu: FakeGPU) -> nn.Module:
    """Return a model whose parts can be called in several ways that take the same times."""
    features = nn.Sequential(Layer(gpu, 1.0, 2.0), Layer(gpu, 2.0, 3.0))
    return Net(
        gpu,
        lambda net, x: net.net(x),
        net=Layer(gpu, 4.0, 7.75),
        backbone=nn.ModuleDict({"features": features}),
        head=Layer(gpu, 1.0, 2.75),
        blocks=nn.ModuleList([Layer(gpu, 1.0, 3.0), Layer(gpu, 3.0, 4.75)]),
        heads=nn.ModuleDict({"a": Layer(gpu, 4.0, 7.75)}),
        encoder=Layer(gpu, 1.0, 3.0),
        decoder=Layer(gpu, 2.0, 4.75),
    )


def vae(net: Any, x: Tensor) -> Tensor:
    hidden = net.encoder(x)
    net.gpu.work(1.0)  # Sampling between two model calls.
    result: Tensor = net.decoder(hidden)
    return result


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "net(x)": lambda net, x: net(x),
    "net.forward(x)": lambda net, x: net.forward(x),
    "net.part(x)": lambda net, x: net.net(x),
    "part of a part": lambda net, x: net.head(net.backbone["features"](x)),
    "forward of a part": lambda net, x: net.head(net.backbone["features"].forward(x)),
    "several parts with glue between": vae,
    "ModuleList": lambda net, x: net.blocks[1](net.blocks[0](x)),
    "ModuleDict": lambda net, x: net.heads["a"](x),
}


@loss_case(STEP_MS, build=with_model(parts), each=CALLS)
def calls(loop: Loop, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
    """`net(x)`, `net.forward(x)`, submodules, nested submodules, `ModuleList` and `ModuleDict`."""
    return loop.tail(call(loop.model, x))


def gradient(net: Any, x: Tensor) -> Tensor:
    [force] = torch.autograd.grad(net.net(x.requires_grad_()).sum(), [x], create_graph=True)
    return force


def with_loss_inside(net: Any, x: Tensor) -> Tensor:
    return work(net.net(x), net.gpu, 0.5, 0.25).sum()


def with_named_loss(net: Any, x: Tensor) -> Tensor:
    out = net.net(x)
    with phase("loss"):
        return work(out, net.gpu, 0.5, 0.25).sum()


def run_block(net: Any, x: Tensor) -> Tensor:
    with phase("forward/block"):
        result: Tensor = net.block(x)
    return result


def train_locally(net: Any, x: Tensor) -> Tensor:
    hidden = net.first(x)
    hidden.sum().backward()
    net.optimizer.step()
    result: Tensor = net.second(hidden.detach())
    return result


def local(gpu: FakeGPU) -> Loop:
    loop = with_net(train_locally, first=(1.0, 1.0), second=(3.0, 3.0))(gpu)
    loop.model.optimizer = Adder(loop.model.first.parameters(), gpu, 2.0)
    return loop


def checkpoint_block(net: Any, x: Tensor) -> Any:
    return checkpoint(run_block, net, net.first(x), use_reentrant=False)


LOSS_INSIDE = 'A loss inside `forward`: `forward`, unless `phase("loss")` splits it off'
CASES += [
    Case(
        "standard step", "A model, its loss and an update", STEP_MS, (*ALL_AND_TRANSFORMERS, MANUAL)
    ),
    Case(
        "module that calls itself",
        "A module that calls itself: one model call",
        STEP_MS,
        build=with_model(lambda gpu: Tree(gpu, 1.5, 3.875)),
    ),
    Case(
        "gradient inside a model call",
        "A gradient inside a model call, such as forces: `forward`",
        times(backward=0.25),  # The backward of a gradient takes no time here.
        build=with_net(gradient, net=(1.0, 3.0)),
    ),
    Case(
        "phase in a checkpointed block",
        "A phase named in a checkpointed block: `forward` only when it runs first",
        times(**{"backward": 8.0, "forward/block": 2.0}),
        build=with_net(checkpoint_block, first=(2.0, 4.0), block=(2.0, 1.75)),
    ),
    Case(
        "update inside a model call",
        "An update inside a model call (local learning): the call continues after it",
        times(backward=4.25, optimizer=4.0),
        (*ALL_AND_TRANSFORMERS, MANUAL),
        build=local,
    ),
    Case(
        "loss inside forward",
        LOSS_INSIDE,
        times(forward=4.5, loss=0.0),
        build=with_net(with_loss_inside, net=(4.0, 7.75)),
        body=lambda loop, x: loop.model(x),
    ),
    Case(
        "loss inside forward, named",
        LOSS_INSIDE,
        STEP_MS,
        build=with_net(with_named_loss, net=(4.0, 7.75)),
        body=lambda loop, x: loop.model(x),
    ),
]


@loss_case(
    times(forward=3.0 + 1.0 + 4.0),
    ALL_AND_TRANSFORMERS,
    build=with_model(lambda gpu: nn.Sequential(Layer(gpu, 3.0, 5.0), Fails(gpu, 1.0, 2.75))),
)
def model_call_that_raises(loop: Loop, x: Tensor) -> Tensor:
    """A model call that raises and is tried again: both are `forward`."""
    try:
        loop.model(x)
    except KeyError:
        loop.gpu.work(1.0)
    return loop.loss(x)


def parametrized(gpu: FakeGPU) -> nn.Module:
    def scale(_: nn.Module, weight: Tensor) -> Tensor:
        gpu.work(0.25)
        return weight

    net = Layer(gpu, 4.0, 8.0)
    parametrize.register_parametrization(net.linear, "weight", Net(gpu, scale))
    return net


@loss_case(times(forward=4.25, loss=3.25), build=with_model(parametrized))
def parametrized_weight(loop: Loop, x: Tensor) -> Tensor:
    """A parametrized weight in the loss: not a model call."""
    loss = work(loop.model(x), loop.gpu, 3.0).sum()
    penalty: Tensor = loop.model.linear.weight.pow(2).sum()
    return loss + penalty


# Losses


class CustomLoss(Net):
    """A loss that does not derive from a loss of torch."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(gpu, lambda _, x: work(x, gpu, 0.5, 0.25).sum())


class Perceptual(nn.Module):
    """A loss that runs a net inside."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu, self.features = gpu, Layer(gpu, 3.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return work(self.features(x).pow(2).mean(), self.gpu, 0.5, 0.25)


class PerceptualLoss(Perceptual, _Loss):
    """A perceptual loss that derives from torch's losses."""


def with_loss(loss: Callable[[FakeGPU], nn.Module]) -> Build:
    return with_model(
        lambda gpu: nn.ModuleDict({"net": Layer(gpu, 4.0, 7.75), "criterion": loss(gpu)})
    )


def loss_module(loop: Loop, x: Tensor, scale: float = 1.0) -> Tensor:
    """A loss module, also weighted, in an accumulation, or with a net inside: `loss`."""
    loss: Tensor = scale * loop.model["criterion"](loop.model["net"](x)) + 0.0
    return loss


PERCEPTUAL_MS = times(loss=3.5, backward=9.0)
for _variant, _loss, _scale, _phases in (
    ("custom", CustomLoss, 1.0, STEP_MS),
    ("custom, weighted", CustomLoss, 0.5, STEP_MS),
    ("perceptual", Perceptual, 1.0, PERCEPTUAL_MS),
    ("perceptual of torch", PerceptualLoss, 1.0, PERCEPTUAL_MS),
):
    _options: dict[str, Any] = {"build": with_loss(_loss)}
    loss_case(_phases, each={_variant: _scale}, **_options)(loss_module)
    _options |= {"each": {f"{_variant}, 2 micro-batches": _scale}, "batches": 6, "micro_batches": 2}
    loss_case(two_micro_batches(_phases), (STEPS, STEP, LIGHTNING, MANUAL), **_options)(loss_module)


@loss_case(STEP_MS, ALL_AND_TRANSFORMERS, build=with_loss(CustomLoss))
def loss_module_in_a_long_sum(loop: Loop, x: Tensor) -> Tensor:
    """A loss module in a sum of many terms: `loss`."""
    loss = loss_module(loop, x)
    for _ in range(44):
        loss = loss + 1e-4 * loop.model["net"].linear.weight.abs().sum()
    return loss


class Count(torchmetrics.SumMetric):
    """A metric whose update takes 4 ms."""

    full_state_update = False  # A call of the metric then runs one update, not two.
    gpu: FakeGPU

    def update(self, value: Any) -> None:
        self.gpu.work(4.0)
        super().update(value)


def with_metric(gpu: FakeGPU) -> nn.Module:
    count = Count()
    count.gpu = gpu
    parts = {"net": Layer(gpu, 4.0, 8.0), "loss": Loss(gpu, 0.5)}
    return nn.ModuleDict({**parts, "metrics": torchmetrics.MetricCollection([count])})


@loss_case(times(loss=4.5), build=with_model(with_metric))
def loss_of_torch_and_a_metric(loop: Loop, x: Tensor) -> Tensor:
    """A loss of torch and a metric of torchmetrics: `loss`."""
    loss: Tensor = loop.model["loss"](loop.model["net"](x), x)
    loop.model["metrics"](loss.detach())
    return loss


@loss_case(TWICE, build=with_model(with_metric))
def loss_between_two_model_calls(loop: Loop, x: Tensor) -> Tensor:
    """A loss module between two model calls: `loss`."""
    first: Tensor = loop.model["loss"](loop.model["net"](x), x)
    return first + loop.model["loss"](loop.model["net"](x), x)  # type: ignore[no-any-return]


# Backward


@loss_case(
    times(backward=12.0), ALL_AND_TRANSFORMERS, each={"reentrant": True, "not reentrant": False}
)
def checkpointed(loop: Loop, x: Tensor, use_reentrant: bool) -> Tensor:
    """Activation checkpointing, both kinds: the recomputation is `backward`."""
    return loop.tail(checkpoint(loop.model, x.requires_grad_(), use_reentrant=use_reentrant))


@loss_case(times(loss=8.5), ALL_AND_TRANSFORMERS)
def gradient_penalty(loop: Loop, x: Tensor) -> Tensor:
    """A penalty by `torch.autograd.grad`: `loss`."""
    loss = loop.loss(x)
    [grad, *_] = torch.autograd.grad(loss, [*loop.model.parameters()], retain_graph=True)
    return loss + 0 * grad.sum()


@loss_case(TWICE, ALL_AND_TRANSFORMERS)
def adversarial_training(loop: Loop, x: Tensor) -> Tensor:
    """A gradient between two model calls (adversarial training): `backward`."""
    [grad] = torch.autograd.grad(loop.loss(x.requires_grad_()), [x])
    return loop.loss(x + grad.sign())


def by_grad(loss: Tensor, loop: Loop) -> None:
    parameters = [*loop.model.parameters()]
    for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = grad


BACKWARDS: dict[str, Callable[[Tensor, Loop], object]] = {
    "torch.autograd.backward(loss)": lambda loss, _: torch.autograd.backward(loss),
    "torch.autograd.backward([loss])": lambda loss, _: torch.autograd.backward([loss]),
    "imported by name": lambda loss, _: imported_backward([loss], retain_graph=True),
    "torch.autograd.grad": by_grad,
}


@body_case(times(optimizer=3.0), each=BACKWARDS)
def ways_to_call_backward(loop: Loop, x: Tensor, backward: Callable[..., object]) -> None:
    """`torch.autograd.backward`, also imported by name, or `torch.autograd.grad` instead."""
    backward(loop.loss(x), loop)
    loop.gpu.work(1.0)
    loop.update()


@body_case(times(backward=16.0, other=1.125))
def two_backwards(loop: Loop, x: Tensor) -> None:
    """Two backwards with `retain_graph`; between them is `other`."""
    loss = loop.loss(x)
    loss.backward(retain_graph=True)
    loop.gpu.work(1.0)
    loss.backward()
    loop.update()


@body_case(times(other=1.125))
def backward_that_raises(loop: Loop, x: Tensor) -> None:
    """After a backward that raises, the next step has every phase."""
    try:
        torch.ones(1).backward()
    except RuntimeError:
        loop.gpu.work(1.0)
    loop.train_on(x)


# Optimizers and gradients


PLACES = ("before forward", "before backward", "after the update")


@body_case(times(other=16.125), each=dict(zip(PLACES, PLACES, strict=True)))
def zero_grad(loop: Loop, x: Tensor, where: str) -> None:
    """`zero_grad` before forward, before backward or after the update: `other`."""

    def clear(now: str) -> None:
        if now == where:
            loop.optimizer.zero_grad()
            loop.gpu.work(16.0)

    clear(PLACES[0])
    loss = loop.loss(x)
    clear(PLACES[1])
    loss.backward()
    loop.optimizer.step()
    clear(PLACES[2])


@body_case(times(optimizer=5.0, other=1.125))
def clipping(loop: Loop, x: Tensor) -> None:
    """Clipping between backward and update: `optimizer`; code after the update: `other`."""
    loop.loss(x).backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.gpu.work(3.0)
    loop.update()
    loop.gpu.work(1.0)


SCALER = with_unknown(lambda _: torch.amp.GradScaler("cpu", init_scale=2.0))


def update_by_scaler(loop: Loop) -> None:
    loop.other.step(loop.optimizer)
    loop.other.update()
    loop.optimizer.zero_grad()


# Unscaling belongs to `optimizer` if an update follows, else to `other`.
@body_case(
    [times(optimizer=3.0), times(optimizer=0.0, other=1.125), times(optimizer=3.0)],
    (STEPS, STEP, MANUAL, WRAPPED),
    build=SCALER,
    options={"_lag": 0},
    skipped_updates=1,
)
def scaler_that_skips(loop: Loop, x: Tensor) -> None:
    """`GradScaler`, and its skipped update: that step has no `optimizer`."""
    loop.other.scale(loop.loss(x) * (float("inf") if loop.number == 1 else 1.0)).backward()
    loop.other.unscale_(loop.optimizer)
    loop.gpu.work(1.0)
    update_by_scaler(loop)


def lbfgs(**options: Any) -> Build:
    return with_optimizer(lambda params, *_: torch.optim.LBFGS(params, lr=0.0, **options))


@body_case({**TWICE, "optimizer": 0.0}, build=lbfgs(max_iter=3))
def closures_of_lbfgs(loop: Loop, x: Tensor) -> None:
    """LBFGS: the sum of its closures."""

    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss(x)
        loss.backward()
        return loss

    loop.optimizer.step(closure)


@body_case(
    times(loss=0.5 + 3.0 + 7.75, backward=7.75, optimizer=0.0), build=lbfgs(max_iter=1, max_eval=1)
)
def physics_informed_net(loop: Loop, x: Tensor) -> None:
    """A physics-informed net: a gradient in the closure of LBFGS is `loss`."""
    x.requires_grad_()

    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        out = loop.model(x)
        [slope] = torch.autograd.grad(out.sum(), x, create_graph=True)
        residual = work(slope, loop.gpu, 3.0)
        loss = work((residual**2).mean() + (out**2).mean(), loop.gpu, 0.5)
        loss.backward()
        return loss

    loop.optimizer.step(closure)


class Searches(Adder):
    """An optimizer that takes time before its closures and after each."""

    def __init__(self, params: Iterator[nn.Parameter], gpu: FakeGPU, ms: float) -> None:
        super().__init__(params, gpu, ms)
        self.closures = 1

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._gpu.work(3.0)
        for _ in range(self.closures):
            closure()
            self._gpu.work(self._ms)


class Hessian(Adder):
    """An optimizer like AdaHessian, which computes a Hessian-vector product."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        weight = self.param_groups[0]["params"][0]
        torch.autograd.grad(weight.grad.sum(), weight)
        weight.grad = None
        return super().step()


class Twice(Adder):
    """An optimizer whose `step` calls that of its base class, and continues."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self._gpu.work(8.0)


@body_case(
    times(other=0.625, optimizer=5.0),
    (STEPS, SAMPLED, MANUAL, WRAPPED),
    each={"one": 1},
    build=with_optimizer(Searches),
)
@body_case(
    times(forward=12.0, loss=1.5, backward=24.0, other=1.625, optimizer=9.0),
    (STEPS, SAMPLED, MANUAL),
    each={"three": 3},
    build=with_optimizer(Searches),
)
def closure_of_an_update(loop: Loop, x: Tensor, closures: int) -> None:
    """A closure is the phases that it calls; the rest of `step` is `optimizer`."""
    loop.optimizer.closures = closures

    def closure() -> None:
        loop.optimizer.zero_grad()
        loop.gpu.work(0.5)
        loop.loss(x).backward()

    loop.optimizer.step(closure)


@body_case(
    times(optimizer=10.0),
    build=with_optimizer(Hessian),
    each={"with a closure": True, "without a closure": False},
)
def gradient_of_an_update(loop: Loop, x: Tensor, has_closure: bool) -> None:
    """A gradient that an update takes itself (AdaHessian): `optimizer`."""

    def closure() -> None:
        work(loop.model(x), loop.gpu, 0.5, 0.25).pow(2).sum().backward(create_graph=True)

    if has_closure:
        loop.optimizer.step(closure)
    else:
        closure()
        loop.optimizer.step()


CASES += [
    Case(
        "closures of LBFGS",
        "LBFGS: the sum of its closures",
        # Time before the second closure's model call belongs to the search.
        {**TWICE, "optimizer": 0.125},
        (LIGHTNING,),
        build=lbfgs(max_iter=3),
    ),
    Case(
        "update that calls its base",
        "An optimizer whose `step` calls that of its base class: one update",
        times(optimizer=10.0),
        ALL_AND_TRANSFORMERS,
        build=with_optimizer(Twice),
    ),
]


@body_case(times(loss=0.0, backward=0.0, other=0.625), absent=frozenset({"backward", "loss"}))
def update_without_a_backward(loop: Loop, x: Tensor) -> None:
    """An update without a backward is `optimizer`; what precedes it is `other`."""
    loop.model(x)
    loop.gpu.work(0.5)
    loop.optimizer.step()


def per_parameter(gpu: FakeGPU) -> Loop:
    loop = Loop(gpu)
    optimizers = {weight: Adder(iter([weight]), gpu, 1.0) for weight in loop.model.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        if loop.other:  # True if the case clears its gradients.
            optimizers[parameter].zero_grad()

    for parameter in loop.model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    loop.optimizers = [*optimizers.values()]
    return loop


@body_case(STEP_MS, build=per_parameter, each={"gradients kept": False, "cleared": True})
def updates_inside_the_backward(loop: Loop, x: Tensor, clears: bool) -> None:
    """Updates inside the backward, by hooks on gradients: `optimizer`."""
    loop.other = clears
    loop.loss(x).backward()


class Failing(Adder):
    """An optimizer that can run out of memory."""

    def __init__(self, params: Iterator[nn.Parameter], gpu: FakeGPU, ms: float) -> None:
        super().__init__(params, gpu, ms)
        self.fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise torch.cuda.OutOfMemoryError("no memory")
        return super().step(closure)


def update_that_raises(loop: Loop, x: Tensor, retries: bool) -> None:
    """An update that raises and is retried or skipped does not hide other updates."""
    loop.loss(x).backward()
    loop.optimizer.fails = loop.number == 1
    try:
        loop.optimizer.step()
    except torch.cuda.OutOfMemoryError:
        loop.optimizer.fails = False
        if retries:
            loop.optimizer.step()


for _retries, _accumulate, _steps, _skipped in (
    (True, 1, [times()] * 8, 0),
    (True, "auto", [times()] * 8, 0),
    (False, 1, [times(), times(optimizer=0.0), *[times()] * 6], 1),
    # The batch without an update is part of the next step.
    (False, "auto", [times(), two_micro_batches(times()), *[times()] * 5], 0),
):
    body_case(
        _steps,
        (STEPS,),
        build=with_optimizer(Failing),
        each={f"retries={_retries}, accumulate_grad_batches={_accumulate}": _retries},
        batches=8,
        options={"accumulate_grad_batches": _accumulate},
        skipped_updates=_skipped,
    )(update_that_raises)


@body_case(STEP_MS, (STEPS, STEP, MANUAL), each={"each batch": (0, 1, 2), "once": (1,)})
def new_optimizer(loop: Loop, x: Tensor, numbers: tuple[int, ...]) -> None:
    """An optimizer that is created later or replaced: `optimizer`."""
    if loop.number in numbers:
        loop.optimizer = Adder(loop.model.parameters(), loop.gpu, 2.0)
    loop.train_on(x)


@body_case(
    times(other=16.125),
    build=with_unknown(lambda gpu: Adder(iter([nn.Parameter(torch.zeros(1))]), gpu, 16.0)),
)
def optimizer_of_another_model(loop: Loop, x: Tensor) -> None:
    """The optimizer of another model: `other`."""
    loop.train_on(x)
    loop.other.step()


class Averaging(torch.optim.Optimizer):
    """An optimizer like PostLocalSGDOptimizer, which never calls `super().__init__`."""

    def __init__(self, params: Iterator[nn.Parameter], gpu: FakeGPU, ms: float) -> None:
        self.gpu, self.optim = gpu, Adder(params, gpu, ms)
        self.param_groups = self.optim.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns nothing
        self.optim.step()
        self.gpu.work(3.0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad()


class Bare(Averaging):
    """An optimizer without hooks and without an inner optimizer."""

    def __init__(self, params: Iterator[nn.Parameter], gpu: FakeGPU, ms: float) -> None:
        self.gpu, self.param_groups = gpu, [{"params": [*params]}]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns nothing
        self.gpu.work(2.0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


class ScheduleFree:
    """A wrapper like that of schedulefree: it has no hooks, and updates by its attribute `base`."""

    def __init__(self, params: Iterator[nn.Parameter], gpu: FakeGPU, ms: float) -> None:
        self.base = Adder(params, gpu, ms)
        self.param_groups = self.base.param_groups

    def step(self) -> None:
        self.base.step()

    def zero_grad(self) -> None:
        self.base.zero_grad()


def post_local_sgd(params: Iterator[nn.Parameter], gpu: FakeGPU, ms: float) -> Any:
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager: Any = SimpleNamespace(average_parameters=lambda params: gpu.work(3.0))
    return PostLocalSGDOptimizer(Adder(params, gpu, ms), averager)


for _variant, _optimizer, _phases in (
    ("alone", Bare, STEP_MS),
    ("around another", Averaging, times(other=3.125)),
    ("PostLocalSGDOptimizer", post_local_sgd, times(optimizer=5.0)),
    ("schedulefree", ScheduleFree, STEP_MS),
):
    CASES.append(
        Case(
            f"optimizer without hooks, {_variant}",
            "An optimizer without hooks; where it wraps another, the inner update is `optimizer`",
            _phases,
            PLAIN,  # Lightning refuses optimizers without hooks.
            build=with_optimizer(_optimizer),
        )
    )


# Several models


def pair(gpu: FakeGPU) -> Loop:
    """Return a loop of two models with an optimizer each."""
    loop = Loop(gpu, nn.ModuleList([Layer(gpu, 1.0, 2.0), Layer(gpu, 4.0, 8.0)]))
    loop.optimizers = [Adder(model.parameters(), gpu, 0.5) for model in loop.model]
    return loop


@body_case(
    times(forward=9.0, loss=0.0, backward=18.0, optimizer=1.0), (*BY_HAND, WRAPPED), build=pair
)
def gan(loop: Loop, x: Tensor) -> None:
    """A GAN with two optimizers, and one timer."""
    generator, critic = loop.model
    fake = generator(x)
    for number, images in ((1, fake.detach()), (0, fake)):
        critic(images).sum().backward()
        loop.optimizers[number].step()
        loop.optimizers[number].zero_grad()


@body_case(times(forward=12.0, loss=1.5, backward=24.0, optimizer=6.0), (*BY_HAND, WRAPPED))
def several_updates_in_one_batch(loop: Loop, x: Tensor) -> None:
    """Several updates in one batch are one step."""
    for _ in range(3):
        loop.train_on(x)


@body_case(
    times(forward=8.0, other=2.125), build=with_unknown(lambda gpu: Layer(gpu, 2.0)), lead_ms=2.125
)
def teacher_and_an_extra_forward(loop: Loop, x: Tensor) -> None:
    """A teacher not passed to the timer: `other`; an extra call without grad: `forward`."""
    with torch.no_grad():
        loop.other(x)
    loop.train_on(x)
    with torch.no_grad():
        loop.model(x)


def evaluate(loop: Loop, x: Tensor, n: int = 1) -> None:
    loop.model.eval()
    with torch.no_grad():
        for _ in range(n):
            loop.model(x)
    loop.model.train()


@body_case(times(other=0.125), PLAIN)
def validation_in_the_body(loop: Loop, x: Tensor) -> None:
    """Calls in eval mode without grad after each update: an evaluation, in no step."""
    loop.train_on(x)
    evaluate(loop, x)


LENGTHS = [10, 11, 14, 9, 20, 8, 12]


@body_case([times(other=4.0 * n + 0.125) for n in LENGTHS], (STEPS,), batches=len(LENGTHS))
def rollouts(loop: Loop, x: Tensor) -> None:
    """Rollouts of varying length in eval mode: `other`, and part of their step."""
    evaluate(loop, x, LENGTHS[loop.number])
    loop.train_on(x)


# The table in the README

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- conformance: begin -->\n", "\n<!-- conformance: end -->"


def with_table(text: str) -> str:
    """Return the text of the README with a new table: a row for each kind of loop."""
    found: dict[str, dict[str, None]] = {}
    for row in CASES:
        runs = found.setdefault(row.about, {})
        runs |= dict.fromkeys("plain loop" if name in PLAIN else name for name in row.front_ends)
    rows = [f"| {about} | {', '.join(runs)} |" for about, runs in found.items()]
    before, _, rest = text.partition(BEGIN)
    table = "\n".join(["| loop | run by |", "|---|---|", *rows])
    return f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
