"""The most memory that is allocated in each phase, with exact bytes on the fake GPU."""

import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_gpu import Adder, FakeAllocator, FakeGPU, Layer, steps, work
from fake_lightning import MemoryLogger, Model, fit
from fake_loop import Logger, Loop, hooks, timed_indices, train
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, MemorySummary, load
from lightning_gputime._memory import PhaseMemory
from lightning_gputime._record import recorder

MIB = 2**20
PARAMETERS = 1000 * MIB


@pytest.fixture
def memory(gpu: FakeGPU) -> FakeAllocator:
    allocator = FakeAllocator(gpu)
    allocator.alloc(PARAMETERS)
    return allocator


class Saves(torch.autograd.Function):
    """The identity: forward leaves activations, backward frees them; both have a temporary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: FakeAllocator, size: int) -> Tensor:
        ctx.memory, ctx.size = memory, size
        memory.temp(3 * size)
        memory.alloc(size)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.memory.temp(5 * ctx.size)
        ctx.memory.alloc(-ctx.size)
        return grads[0], None, None


class Part(nn.Module):
    def __init__(self, memory: FakeAllocator, size: int) -> None:
        super().__init__()
        self._memory, self._size = memory, size
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Saves.apply(self.linear(x), self._memory, self._size)  # type: ignore[no-untyped-call]
        return result


class Net(nn.Sequential):
    """Two parts of 10 and 20 MiB."""

    def __init__(self, memory: FakeAllocator) -> None:
        super().__init__(Part(memory, 10 * MIB), Part(memory, 20 * MIB))


class Momentum(Adder):
    """An optimizer that allocates its state in the first update."""

    def __init__(self, model: nn.Module, memory: FakeAllocator, gpu: FakeGPU) -> None:
        super().__init__(model.parameters(), gpu, 2.0)
        self._memory, self._has_state = memory, False

    def step(self, closure: Any = None) -> Any:
        if not self._has_state:
            self._memory.alloc(100 * MIB)
            self._has_state = True
        self._memory.temp(MIB)
        return super().step(closure)


class Training:
    """A plain loop on a net that allocates; `late` is called in the loss of some steps."""

    def __init__(self, gpu: FakeGPU, allocator: FakeAllocator, **options: Any) -> None:
        self.gpu, self.memory = gpu, allocator
        self.net = Net(allocator)
        self.optimizer = Momentum(self.net, allocator, gpu)
        self.timer = GPUPhaseHooks(
            self.net, self.optimizer, _clock=gpu, **{"warmup_steps": 0, "memory": True, **options}
        )

    def run(
        self, n: int = 1, late: dict[int, Callable[[], None]] | None = None, first: int = 0
    ) -> GPUPhaseHooks:
        with self.timer:
            for i, x in enumerate(self.timer.steps(self.batches(n)), first):
                loss = self.net(x).sum()
                self.memory.temp(2 * MIB)
                (late or {}).get(i, lambda: None)()
                loss.backward()
                self.optimizer.step()
        return self.timer

    def batches(self, n: int) -> Iterator[Tensor]:
        for _ in range(n):
            self.memory.temp(7 * MIB)
            yield torch.ones(1, 2)


def summary(timer: Any) -> MemorySummary:
    found = timer.summary().memory
    assert isinstance(found, MemorySummary)
    return found


FIRST_STEP = {
    "data": 1007.0,
    # What the first part has left, and the temporary of the second.
    "forward": 1000.0 + 10 + 60,
    "loss": 1032.0,
    "backward": 1030.0 + 100,
    "optimizer": 1101.0,
}
LATER_STEP = {name: mb + 100 if name != "optimizer" else mb for name, mb in FIRST_STEP.items()}


def above(peaks: Any) -> dict[str, float]:
    return {name: mb for name, mb in peaks.items() if name != "other"}


def test_the_peak_of_each_phase_is_exact(gpu: FakeGPU, memory: FakeAllocator) -> None:
    timer = Training(gpu, memory).run(1)
    assert above(summary(timer).peak_mib) == FIRST_STEP
    assert {*summary(timer).at_step.values()} == {0}
    rows = timer.summary().rows
    assert {name: row.peak_mib for name, row in rows.items() if name != "other"} == FIRST_STEP
    assert timer.summary().step.peak_mib == 1130.0


def test_the_state_of_the_optimizer_counts_from_the_first_update_on(
    gpu: FakeGPU, memory: FakeAllocator
) -> None:
    timer = Training(gpu, memory).run(3)
    assert above(summary(timer).peak_mib) == LATER_STEP
    assert summary(timer).at_step["backward"] == 1
    assert summary(timer).at_step["optimizer"] == 0
    assert summary(timer).start_mib == 1100.0
    assert summary(timer).steps == 3


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_log_has_the_highest_peak_since_the_last_log(
    gpu: FakeGPU, memory: FakeAllocator, lag: int, n: int
) -> None:
    logger = Logger()
    late = {
        1: lambda: memory.temp(500 * MIB),
        2: lambda: memory.temp(700 * MIB),
    }
    Training(gpu, memory, logger=logger, log_every_n_steps=n, _lag=lag).run(3, late)
    loss = {0: 1032.0, 1: 1630.0, 2: 1830.0}
    expected = {1: [loss[0], loss[1], loss[2]], 2: [loss[1], loss[2]], 3: [loss[2]]}[n]
    if (lag, n) == (3, 2):
        expected = [loss[2]]  # Training ends before the first log is due: there is one at the end.
    assert [metrics["phase_time/loss_peak_mib"] for _, metrics in logger.calls] == expected
    _, metrics = logger.calls[-1]
    assert metrics["phase_time/backward_peak_mib"] == LATER_STEP["backward"]


def test_one_step_in_20_is_sampled_after_the_first_three(
    gpu: FakeGPU, memory: FakeAllocator
) -> None:
    training = Training(gpu, memory)
    reads = dict.fromkeys(range(45), 0)

    def note(i: int) -> Callable[[], None]:
        return lambda: reads.update({i: memory.reads})

    training.run(45, {i: note(i) for i in reads})
    # Between the losses of two steps: at the end of the one, and in the next up to there.
    changed = [i for i in range(1, 45) if reads[i] != reads[i - 1]]
    assert changed == [1, 2, 3, 20, 21, 40, 41]
    assert summary(training.timer).steps == 5
    assert summary(training.timer).at_step["data"] == 1


def test_a_step_that_is_not_sampled_does_not_count(gpu: FakeGPU, memory: FakeAllocator) -> None:
    timer = Training(gpu, memory).run(30, {10: lambda: memory.temp(5000 * MIB)})
    assert above(summary(timer).peak_mib) == LATER_STEP


def test_off_nothing_is_called_and_nothing_is_said(
    gpu: FakeGPU, memory: FakeAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    timer = Training(gpu, memory, memory=False).run(3)
    assert (memory.reads, memory.resets) == (0, 0)
    assert timer.summary().memory is None
    assert "MiB" not in str(timer.summary())
    assert timer.summary().rows["forward"].peak_mib is None
    assert "memory" not in caplog.text


def test_the_times_are_the_same(gpu: FakeGPU) -> None:
    of_two = []
    for memory in (True, False):
        gpu = FakeGPU()
        FakeAllocator(gpu)
        loop = Loop(gpu)
        timer = train(loop, 30, memory=memory)
        of_two.append((steps(timer), gpu.waits))
    assert of_two[0] == of_two[1]


def test_modules_have_peaks_of_their_own(gpu: FakeGPU, memory: FakeAllocator) -> None:
    timer = Training(gpu, memory, modules=["0", "1"]).run(1)
    peaks = summary(timer).peak_mib
    assert peaks["forward/0"] == 1030.0
    assert peaks["forward/1"] == peaks["forward"] == 1070.0
    assert peaks["backward/1"] == peaks["backward"] == 1130.0
    assert peaks["backward/0"] == 1010.0 + 50


def test_micro_batches_of_one_step_share_its_peaks(gpu: FakeGPU, memory: FakeAllocator) -> None:
    training = Training(gpu, memory, accumulate_grad_batches=2)
    timer = training.timer
    with timer:
        for i, x in enumerate(timer.steps(training.batches(4))):
            loss = training.net(x).sum()
            memory.temp((40 if i == 1 else 2) * MIB)
            loss.backward()
            if i % 2:
                training.optimizer.step()
    assert summary(timer).peak_mib["loss"] == 1132.0
    assert summary(timer).at_step["loss"] == 1
    assert summary(timer).steps == 2


def test_an_evaluation_counts_for_no_phase(gpu: FakeGPU, memory: FakeAllocator) -> None:
    training = Training(gpu, memory)
    timer = training.timer

    def evaluate() -> None:
        with timer.paused():
            memory.temp(9000 * MIB)
            with torch.no_grad():
                training.net.eval()
                training.net(torch.ones(1, 2))
                training.net.train()
            memory.alloc(-30 * MIB)

    training.run(3, {0: evaluate, 2: evaluate})
    assert above(summary(timer).peak_mib) == LATER_STEP
    assert summary(timer).steps == 3


def test_what_is_allocated_while_steps_are_read_counts(gpu: FakeGPU, memory: FakeAllocator) -> None:
    def allocate(_: Any) -> None:
        memory.temp(300 * MIB)

    timer = Training(gpu, memory, observers=[allocate], _lag=0).run(2)
    assert summary(timer).peak_mib["data"] == 1400.0
    assert summary(timer).at_step["data"] == 1


def test_steps_between_the_timed_ones_are_not_sampled(gpu: FakeGPU, memory: FakeAllocator) -> None:
    untimed = {*range(12)} - {*timed_indices(2, 12)}
    late = dict.fromkeys(untimed, lambda: memory.temp(5000 * MIB))
    timer = Training(gpu, memory, every_n_steps=2).run(12, late)
    assert above(summary(timer).peak_mib) == LATER_STEP
    assert [*summary(timer).at_step.values()] == [1] * 6


def test_probed_steps_are_not_sampled(
    gpu: FakeGPU, memory: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = []
    monkeypatch.setattr(recorder, "SAMPLED_EVERY", 1)
    monkeypatch.setattr(PhaseMemory, "_keep", lambda _, number, peaks: sampled.append(number))
    timer = Training(gpu, memory, probe_every_n_steps=4).run(60)
    assert timer.summary().probed_steps
    assert sampled == timer.history()["step"].tolist()


def test_an_error_of_the_counters_is_said_once_and_the_times_go_on(
    gpu: FakeGPU, memory: FakeAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        memory.error = RuntimeError("no counters any more")

    timer = Training(gpu, memory).run(60, {1: fail})
    assert caplog.text.count("Memory is no longer measured") == 1
    assert above(summary(timer).peak_mib) == FIRST_STEP
    assert summary(timer).steps == 1
    assert len(steps(timer)) == 60


# Others who read and reset the same counters


def test_it_is_said_once_that_the_peaks_of_others_are_reset(
    gpu: FakeGPU, memory: FakeAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    Training(gpu, memory).run(45)
    assert [record.message for record in caplog.records] == [
        "memory=True resets torch's peak counters in the steps that it samples (the first 3, then 1"
        " in 20): max_memory_allocated() then has the peak since the last boundary of such a step."
    ]


def test_others_read_the_peak_since_the_last_boundary_of_a_sampled_step(
    gpu: FakeGPU, memory: FakeAllocator
) -> None:
    read: list[int] = []

    def note() -> None:
        read.append(memory.peak // MIB)

    memory.temp(2000 * MIB)
    Training(gpu, memory).run(22, dict.fromkeys(range(22), note))
    # In the loss, after `forward`; from step 3 on after its begin.
    assert read[:3] == [1032, 1132, 1132]
    assert read[3:20] == [1170] + [1230] * 16
    assert read[20:] == [1132, 1170]


def test_nothing_is_replaced(gpu: FakeGPU, memory: FakeAllocator) -> None:
    training = Training(gpu, memory)
    before, meanwhile = {*vars(memory)}, set[str]()
    training.run(2, {1: lambda: meanwhile.update(vars(memory))})
    assert meanwhile == before


def test_a_reset_by_others_that_is_seen_is_told_once_and_its_step_left_out(
    gpu: FakeGPU, memory: FakeAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    def reset() -> None:
        memory.alloc(-40 * MIB)
        memory.peak = memory.allocated
        memory.alloc(5 * MIB)

    def put_back() -> None:
        memory.alloc(35 * MIB)

    training = Training(gpu, memory)
    training.run(22, {1: reset, 2: put_back, 20: reset})
    assert caplog.text.count("other code resets the peak counters") == 1
    assert summary(training.timer).steps == 2
    assert {*summary(training.timer).at_step.values()} <= {0, 2}


def test_a_reset_by_others_below_which_nothing_was_freed_takes_what_was_before(
    gpu: FakeGPU, memory: FakeAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    def reset() -> None:
        memory.temp(50 * MIB)
        memory.peak = memory.allocated
        memory.temp(40 * MIB)

    timer = Training(gpu, memory).run(3, {1: reset})
    assert summary(timer).peak_mib["loss"] == 1170.0
    assert summary(timer).peak_mib["forward"] == LATER_STEP["forward"]
    assert "other code" not in caplog.text


def test_steps_that_two_timers_sample_at_once_have_no_peaks(
    gpu: FakeGPU, memory: FakeAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(gpu, memory)
    other = Layer(gpu, 4.0, 4.0)
    of_other = GPUPhaseHooks(
        other, Adder(other.parameters(), gpu, 1.0), _clock=gpu, memory=True, warmup_steps=0
    )

    def train_other() -> None:
        other(torch.ones(1, 2)).sum().backward()
        of_other.step()

    with of_other:
        training.run(2, dict.fromkeys(range(2), train_other))
    training.run(1, first=2)
    assert caplog.text.count("other code resets the peak counters") == 2
    assert summary(training.timer).steps == 1
    assert above(summary(training.timer).peak_mib) == LATER_STEP


def test_a_timer_can_be_attached_again(gpu: FakeGPU, memory: FakeAllocator) -> None:
    training = Training(gpu, memory)
    training.run(2, {1: lambda: memory.temp(800 * MIB)})
    timer = training.run(2)
    assert above(summary(timer).peak_mib) == LATER_STEP


def test_a_process_that_is_forked_off_leaves_the_counters_alone(
    gpu: FakeGPU, memory: FakeAllocator
) -> None:
    training = Training(gpu, memory)
    with training.timer as timer:
        for i, x in enumerate(timer.steps(training.batches(3))):
            if i == 1 and not (child := os.fork()):
                reads = memory.reads, memory.resets
                training.net(x).sum().backward()
                timer.remove()
                os._exit(reads != (memory.reads, memory.resets))
            training.net(x).sum().backward()
            training.optimizer.step()
    assert os.waitpid(child, 0)[1] == 0
    assert summary(timer).steps == 3


# Graphs, errors, other devices


def test_while_a_graph_is_captured_nothing_is_touched(
    gpu: FakeGPU, memory: FakeAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(gpu)
    with hooks(loop, memory=True) as timer:
        for i, x in enumerate(timer.steps(loop.batches(30))):
            if i == 1:
                with gpu.capture() as replay:
                    loop.train(x)
            elif i > 1:
                replay()
            else:
                loop.train(x)
    assert not gpu.capture_broken
    assert summary(timer).steps == 1
    assert caplog.text.count("a captured graph has its own memory") == 1


def test_on_the_cpu_it_is_said_and_nothing_else_happens(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GPUPhaseHooks(model, optimizer, memory=True, warmup_steps=0) as timer:
        for x in timer.steps([torch.ones(1, 2)] * 3):
            model(x).sum().backward()
            optimizer.step()
    assert caplog.text.count("nothing is measured on the CPU") == 1
    assert timer.summary().memory is None


def test_a_device_that_does_not_count_is_told(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    class Bare(FakeAllocator):
        def read(self) -> dict[str, Any]:
            return {}

    Bare(gpu)
    loop = Loop(gpu)
    timer = train(loop, 2, memory=True)
    assert caplog.text.count("cannot be read") == 1
    assert len(steps(timer)) == 2


@pytest.fixture
def cuda(gpu: FakeGPU, memory: FakeAllocator, monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    """Stands for a CUDA device behind the functions of torch."""
    torch_c: Any = torch._C
    for read, reset in (
        ("_accelerator_getDeviceStats", "_accelerator_resetPeakStats"),
        ("_cuda_memoryStats", "_cuda_resetPeakMemoryStats"),
    ):
        monkeypatch.setattr(torch_c, read, lambda index: memory.read(), raising=False)
        monkeypatch.setattr(torch_c, reset, lambda index: memory.reset(), raising=False)
    about = type("Properties", (), {"total_memory": 4000 * MIB})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    gpu.allocator = None
    gpu.device = torch.device("cuda", 0)
    return memory


def test_torchs_own_counters_are_read(gpu: FakeGPU, cuda: FakeAllocator) -> None:
    cuda.temp(2000 * MIB)
    timer = Training(gpu, cuda).run(5)
    assert above(summary(timer).peak_mib) == LATER_STEP
    assert summary(timer).device_mib == 4000.0


def test_a_loop_that_is_left_inside_a_step_keeps_its_peaks(
    gpu: FakeGPU, memory: FakeAllocator
) -> None:
    training = Training(gpu, memory)
    timer = training.timer
    with timer:
        for x in timer.steps(training.batches(3)):
            loss = training.net(x).sum()
            memory.temp(2 * MIB)
            loss.backward()
            training.optimizer.step()
            memory.temp(9000 * MIB)
            break
    assert above(summary(timer).peak_mib) == FIRST_STEP


def test_a_step_goes_on_after_a_loop_that_was_left_before_its_update(
    gpu: FakeGPU, memory: FakeAllocator
) -> None:
    training = Training(gpu, memory)
    timer = training.timer
    with timer:
        for x in timer.steps(training.batches(3)):
            loss = training.net(x).sum()
            break
        memory.temp(2 * MIB)
        loss.backward()
        training.optimizer.step()
        timer.step()
    assert above(summary(timer).peak_mib) == FIRST_STEP
    assert summary(timer).steps == 1


def test_a_step_that_is_dropped_takes_its_peaks_with_it(
    gpu: FakeGPU, memory: FakeAllocator
) -> None:
    training = Training(gpu, memory)
    timer = training.timer
    with timer:
        for i, x in enumerate(timer.steps(training.batches(3))):
            try:
                training.net(x).sum().backward()
                if i == 0:
                    memory.temp(9000 * MIB)
                    raise ValueError
                training.optimizer.step()
            except ValueError:
                timer._session.begin()
    assert summary(timer).peak_mib["backward"] == LATER_STEP["backward"]
    assert max(summary(timer).peak_mib.values()) < 2000


def test_memory_must_be_a_switch() -> None:
    with pytest.raises(TypeError, match="memory must be True or False, got 20"):
        GPUPhaseTimer(memory=20)  # type: ignore[arg-type]


# Lightning, files, words


def test_lightning_logs_and_keeps_peaks(gpu: FakeGPU, memory: FakeAllocator) -> None:
    class Allocates(Model):
        def loss(self, x: Tensor) -> Tensor:
            y = self(x)
            memory.temp(30 * MIB)
            return work(y, gpu, 0.5, 0.25).sum()

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            memory.temp(4000 * MIB)
            super().validation_step(batch, batch_idx)

        def val_dataloader(self) -> Any:
            return [torch.ones(1, 2)]

    logger = MemoryLogger()
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, memory=True)
    fit(gpu, Allocates(gpu), 6, timer=timer, logger=logger, log_every_n_steps=3)
    assert summary(timer).peak_mib["loss"] == 1030.0
    assert max(summary(timer).peak_mib.values()) == 1030.0
    _, metrics = logger.phase_times()[0]
    assert metrics["phase_time/loss_peak_mib"] == 1030.0
    assert metrics["phase_time/forward_peak_mib"] == 1000.0
    assert summary(pickle.loads(pickle.dumps(timer))) == summary(timer)


def test_a_saved_run_has_the_peaks(gpu: FakeGPU, memory: FakeAllocator, tmp_path: Any) -> None:
    memory.total = 81_559 * MIB
    timer = Training(gpu, memory).run(3)
    timer.save(tmp_path / "run.json")
    run = load(tmp_path / "run.json")
    assert run.summary().memory == summary(timer)
    assert run.summary().rows["backward"].peak_mib == LATER_STEP["backward"]
    assert str(run.summary()) == str(timer.summary())


def test_the_table_and_the_sentence_say_it(gpu: FakeGPU, memory: FakeAllocator) -> None:
    memory.total = 81_559 * MIB
    text = str(Training(gpu, memory).run(3).summary())
    [header] = [line for line in text.splitlines() if line.startswith("phase ")]
    assert header.endswith("peak MiB")
    [backward] = [line for line in text.splitlines() if line.startswith("backward")]
    assert backward.endswith("1,230.0")
    assert (
        "memory: the highest is `backward` with 1,230 of 81,559 MiB, at step 1; `forward` follows"
        " with 1,170"
    ) in text


@pytest.mark.parametrize(
    ("peaks", "held", "advice"),
    [
        ({"forward": 80, "backward": 95}, 20, "75 of it from the step itself: checkpoint"),
        ({"forward": 80, "backward": 95}, 70, "70 of it there when a step begins: shard"),
        ({"backward": 80, "optimizer": 95}, 70, "25 of it from the step itself: try foreach=False"),
        ({"backward": 80, "optimizer": 95}, 90, "90 of it there when a step begins: shard"),
        ({"data": 95}, 30, "95% of the GPU's\n"),
        ({"backward": 89}, 30, "at step 4\n"),
    ],
)
def test_advice_is_given_where_the_numbers_back_it(
    peaks: dict[str, int], held: int, advice: str
) -> None:
    found = MemorySummary(peaks, dict.fromkeys(peaks, 4), held, 100, steps=1)
    assert advice in f"{found.sentences[0]}\n"
