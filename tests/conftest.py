import gc
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import register
import torch
from fake_gpu import FakeGPU
from fake_loop import Loop
from fake_ranks import Ranks, places
from torch.optim import optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_gputime.__main__ import main
from lightning_gputime._compat import python_
from lightning_gputime._instrumentation import traced
from lightning_gputime._instrumentation.patching import FunctionPatch, patch_of
from lightning_gputime._ledger import watch
from lightning_gputime._messages import WarnOnce
from lightning_gputime._record import clock

# In a background job of a shell, SIGINT is ignored, and child processes inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The fakes are what libraries are to users.
python_._LIBRARIES += ("fake_gpu", "fake_loop", "fake_lightning", "fake_ranks")

# Typed as Any, because the function that runs its engine is private.
AUTOGRAD: Any = torch.autograd


@pytest.fixture(autouse=True, scope="module")
def _imported_objects_are_not_collected() -> None:
    """Exclude what was imported so far from garbage collections, which would take 0.3 s each."""
    gc.collect()  # Garbage would be excluded, too.
    gc.freeze()


@pytest.fixture
def gpu() -> FakeGPU:
    return FakeGPU()


@pytest.fixture
def loop(gpu: FakeGPU) -> Loop:
    return Loop(gpu)


Command = Callable[..., Any]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs the command line and checks its exit code."""

    def run(*arguments: object, code: int = 0) -> Any:
        capsys.readouterr()
        try:
            exit_code: Any = main([*map(str, arguments)])
        except SystemExit as exit_:  # argparse exits.
            exit_code = exit_.code
        assert exit_code == code
        return capsys.readouterr()

    return run


@pytest.fixture
def is_bare(loop: Loop) -> Iterator[Callable[[], bool]]:
    """Return a check that the loop has no hooks of a timer. It must hold after the test, too."""
    hooked = (*loop.model.modules(), loop.optimizer)
    bare = installed(*hooked)

    def is_bare() -> bool:
        return installed(*hooked) == bare

    yield is_bare
    assert is_bare()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Make this process the first of two ranks, whose collectives do nothing."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def ranks(two_ranks: None, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Make this process the first of two ranks, whose collectives take `COMM_MS`."""
    return Ranks(gpu, monkeypatch)


@pytest.fixture(autouse=True)
def _nothing_stays_installed() -> Iterator[None]:
    engine = AUTOGRAD._engine_run_backward
    clock._warn_once = WarnOnce()
    before = places()
    collections = [*gc.callbacks]
    yield
    assert places() == before
    assert gc.callbacks == collections
    left, traced._active[:] = [*traced._active], []
    assert not left
    assert AUTOGRAD._engine_run_backward is engine
    assert not optimizer._global_optimizer_pre_hooks
    running, watch._running = watch._running, None
    assert running is None
    assert not optimizer._global_optimizer_post_hooks


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet() -> None:
    # Hooks stay attached between timed steps once anything was compiled in this process.
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        dynamo.counters.clear()


@pytest.fixture(autouse=True)
def _replaced_functions_are_in_the_register() -> Iterator[None]:
    unknown: list[str] = []
    make: Any = FunctionPatch.__init__

    def checked(self: FunctionPatch, owner: Any, name: str, *rest: Any) -> None:
        if register.find(owner, name) is None:
            unknown.append(f"{name} of {owner}")
        make(self, owner, name, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FunctionPatch, "__init__", checked)
        yield
    assert not unknown, "see tests/register.py"


@pytest.fixture(autouse=True)
def _gpu_tests_are_skipped_without_a_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def installed(*things: object) -> list[dict[str, object]]:
    """Return the hooks and instance attributes of modules and optimizers."""
    return [
        {
            name: (OrderedDict(value), [*getattr(value, "__dict__", ())])
            if "hooks" in name and isinstance(value, dict)
            else None
            for name, value in vars(thing).items()
            if name not in ("state", "training")
        }
        for thing in things
    ]


def is_patched(function: object) -> bool:
    """Return whether a function is a timer's replacement."""
    return patch_of(function) is not None


def hooks_of(model: torch.nn.Module) -> list[dict[str, object]]:
    return [
        {name: value for name, value in module.items() if "hooks" in name}
        for module in installed(*model.modules())
    ]
