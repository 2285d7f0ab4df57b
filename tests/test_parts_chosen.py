"""The option `modules` as a depth, as patterns and as all, and the table of many modules."""

import random
from typing import Any

import pytest
import torch
from conftest import installed
from fake_gpu import Adder, FakeGPU, Layer, batches, work
from fake_loop import Loop, hooks
from torch import Tensor, nn
from torchmetrics.classification import BinaryAccuracy

from lightning_gputime import GPUPhaseHooks
from lightning_gputime._instrumentation.modules import resolve


class Work(nn.Module):
    """A module that takes a given time, without submodules."""

    def __init__(self, gpu: FakeGPU, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.times = (gpu, forward_ms, backward_ms)

    def forward(self, x: Tensor) -> Tensor:
        return work(x, *self.times)


class Block(nn.Module):
    def __init__(self, gpu: FakeGPU, ms: float) -> None:
        super().__init__()
        self.attn, self.mlp = Work(gpu, ms, 1.0), Work(gpu, 2.0, 4.0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mlp(self.attn(x))
        return result


class GPT(nn.Module):
    """Ever longer layers between an embedding and a head, of which the head is declared first."""

    def __init__(self, gpu: FakeGPU, layers: int = 3) -> None:
        super().__init__()
        self.accuracy = BinaryAccuracy()
        self.head, self.emb = Work(gpu, 3.0, 6.0), Layer(gpu, 1.0, 2.0)
        self.layers = nn.ModuleList(Block(gpu, number) for number in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def train(gpu: FakeGPU, model: nn.Module, modules: Any) -> GPUPhaseHooks:
    optimizer = Adder(model.parameters(), gpu, 2.0)
    bare = installed(*model.modules())
    with GPUPhaseHooks(model, optimizer, _clock=gpu, modules=modules, warmup_steps=0) as timer:
        for x in timer.steps(batches(gpu, 3)):
            model(x).sum().backward()
            optimizer.step()
    assert installed(*model.modules()) == bare
    return timer


LAYERS = ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (1, ["head", "emb", *LAYERS]),
        ("*", ["head", "emb"]),
        ("layers.*", LAYERS),
        (["layers.*", "head"], ["head", *LAYERS]),
        (("layers.[02]", "layers.1"), LAYERS),
        ("layers.?.attn", [f"{layer}.attn" for layer in LAYERS]),
        ("**.mlp", [f"{layer}.mlp" for layer in LAYERS]),
        ("**.layers.1.**", ["layers.1", "layers.1.attn", "layers.1.mlp"]),
        ("head", ["head"]),
        (["emb", "e*"], ["emb"]),
    ],
)
def test_depths_and_patterns_select_modules_in_model_order(
    gpu: FakeGPU, modules: Any, names: list[str]
) -> None:
    assert [*resolve(modules, GPT(gpu))] == names


@pytest.mark.parametrize("modules", [2, 100, "all", "**", ["all"]])
def test_large_depth_or_all_selects_all_callable_modules(gpu: FakeGPU, modules: Any) -> None:
    of_layers = [f"{layer}{part}" for layer in LAYERS for part in ("", ".attn", ".mlp")]
    assert [*resolve(modules, GPT(gpu))] == ["head", "emb", "emb.linear", *of_layers]


def test_wrapper_names_are_left_out(gpu: FakeGPU) -> None:
    compiled: Any = torch.compile(Block(gpu, 1.0), backend="eager")
    found = resolve("all", nn.Sequential(compiled))
    assert [*found] == ["0", "0.attn", "0.mlp"]
    assert found["0"] is compiled


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_scripted_modules_and_custom_forwards_are_selected() -> None:
    held = nn.ModuleList([nn.Linear(2, 2)])
    held.forward = held[0].forward
    net = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), held)
    assert [*resolve("all", net)] == ["0", "1", "1.0"]


def test_module_names_are_turned_into_phase_names(gpu: FakeGPU) -> None:
    net = nn.ModuleDict({name: Work(gpu, 1.0, 1.0) for name in ("a/b", "<c>", "comm")})
    assert [*resolve("all", net)] == ["a_b", "_c_", "comm_"]


def test_shared_module_is_selected_by_either_name() -> None:
    model = nn.Module()
    model.first = model.second = nn.Linear(1, 1)
    assert resolve(["second"], model) == {"second": model.first}
    assert resolve("all", model) == {"first": model.first}


@pytest.mark.parametrize("modules", [1, "all"])
def test_model_without_submodules_has_no_selection(gpu: FakeGPU, modules: Any) -> None:
    assert resolve(modules, Work(gpu, 1.0, 1.0)) == {}


def test_empty_selection_is_refused_with_the_available_modules(gpu: FakeGPU) -> None:
    model = GPT(gpu, 1)
    with pytest.raises(ValueError, match=r"matches 'tail\.\*' .* has head, emb, emb\.linear, lay"):
        GPUPhaseHooks(model, modules=["layers.*", "tail.*"])
    with pytest.raises(ValueError, match=r"matches '\*' .* it has none inside"):
        GPUPhaseHooks(Work(gpu, 1.0, 1.0), modules="*")
    with pytest.raises(ValueError, match=r"'layers' only contains modules.* give 'layers\.\*'"):
        GPUPhaseHooks(model, modules="layers")
    with pytest.raises(ValueError, match=r"modules must be 1 or more .* got 0"):
        GPUPhaseHooks(model, modules=0)


def test_selection_of_over_a_hundred_modules_is_refused(gpu: FakeGPU) -> None:
    model = GPT(gpu, 33)
    assert len(resolve("**.layers.**", model)) == 99
    with pytest.raises(ValueError, match=r"'all' selects 102 modules .* give a smaller depth"):
        GPUPhaseHooks(model, modules="all")
    names = [name for name, _ in model.named_modules() if name.count(".")]
    assert len(resolve([*names, "head", "emb"], model)) == 102


def test_table_indents_nested_modules_in_the_order_of_their_calls(gpu: FakeGPU) -> None:
    timer = train(gpu, GPT(gpu, 2), ["head", "emb", "layers.0", "layers.0.*", "layers.1.mlp"])
    lines = str(timer.summary()).splitlines()
    rows = [line.partition(".000")[0].rsplit(maxsplit=1) for line in lines]
    names = ["  emb", "  layers.0", "    .attn", "    .mlp", "  layers.1.mlp", "  head"]
    at = [line.split(" ")[0] for line in lines].index("forward")
    means_ms = ["9", "1", "2", "0", "2", "2", "3"]
    assert rows[at : at + 7] == [[*row] for row in zip(["forward", *names], means_ms, strict=True)]
    at = [line.split(" ")[0] for line in lines].index("backward")
    assert [name for name, _ in rows[at : at + 7]] == ["backward", *names]


def test_table_shows_the_ten_longest_modules_and_counts_the_others(gpu: FakeGPU) -> None:
    timer = train(gpu, GPT(gpu, 12), "layers.*")
    text = str(timer.summary())
    assert text.index("layers.2 ") < text.index("layers.9 ") < text.index("layers.10 ")
    assert "layers.0 " not in text
    assert "layers.1 " not in text
    assert text.splitlines().count("  2 others") == 2
    assert len([name for name in timer.summary().rows if "layers" in name]) == 24
    columns = {f"forward/layers.{number}_ms" for number in range(12)}
    assert columns <= {*(timer.history().dtype.names or ())}


def test_table_shows_all_of_eleven_modules(gpu: FakeGPU) -> None:
    text = str(train(gpu, GPT(gpu, 11), "layers.*").summary())
    assert text.count("  layers.") == 22
    assert "others" not in text


class Node(nn.Module):
    """Randomly nested modules, some called twice in a row, with work between them."""

    def __init__(self, gpu: FakeGPU, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.gpu = gpu
        inside = [
            Node(gpu, rng, depth - 1)
            if depth > 1 and rng.random() < 0.7
            else Work(gpu, rng.randint(1, 9), rng.randint(1, 9))
            for _ in range(rng.randint(1, 3))
        ]
        self.inside = nn.ModuleList(inside)
        self.calls = [module for module in inside for _ in range(rng.choice((1, 1, 1, 2)))]
        self.between = [
            (rng.choice((0, rng.randint(1, 9))), rng.choice((0, rng.randint(1, 9))))
            for _ in range(len(self.calls) + 1)
        ]

    def forward(self, x: Tensor) -> Tensor:
        for module, between in zip((nn.Identity(), *self.calls), self.between, strict=True):
            x = module(x)
            if any(between):
                x = work(x, self.gpu, *between)
        return x


def add_times(
    module: nn.Module, names: dict[nn.Module, str], found: dict[str, float], path: str = ""
) -> None:
    """Add the times of each named module, including the modules inside it."""
    if module in names:
        path = f"{path}/{names[module]}"
    own_ms = module.between if isinstance(module, Node) else [module.times[1:]]  # type: ignore[index]
    for forward_ms, backward_ms in own_ms:
        for i in range(path.count("/") + 1):
            parent = "/".join(path.split("/")[: i + 1])
            found[f"forward{parent}"] = found.get(f"forward{parent}", 0.0) + forward_ms
            found[f"backward{parent}"] = found.get(f"backward{parent}", 0.0) + backward_ms
    if isinstance(module, Node):
        for inner in module.calls:
            add_times(inner, names, found, path)


@pytest.mark.parametrize("seed", range(40))
def test_nested_modules_are_timed_exactly(gpu: FakeGPU, seed: int) -> None:
    rng = random.Random(seed)
    root = Node(gpu, rng, 3)
    net = nn.Sequential(nn.Linear(2, 2), Work(gpu, 1.0, 1.0), root)
    share = rng.random()
    # Always select "1": it runs last in backward, so its start ends the phase of another module.
    names: dict[nn.Module, str] = {
        module: name
        for name, module in net.named_modules()
        if isinstance(module, Node | Work) and (name == "1" or rng.random() < share)
    }
    expected: dict[str, float] = {}
    for module in (net[1], root):
        add_times(module, names, expected)
    timer = train(gpu, net, [*names.values()])
    assert timer.last_step is not None
    found = timer.last_step.phase_ms
    assert {key: ms for key, ms in found.items() if key.startswith(("forw", "backw"))} == expected


def test_step_with_many_modules_is_not_dropped(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(gpu, GPT(gpu, 20))
    with hooks(loop, modules=2, accumulate_grad_batches=16) as timer:
        for x in timer.steps(loop.batches(16)):
            loop.loss(x).backward()
        loop.update()
    assert "boundaries" not in caplog.text
    assert len(timer.history()) == 1
