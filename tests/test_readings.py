"""Results of a timer: history, saved file, JSON and timeline."""

import json
import math
from pathlib import Path

import pandas
import pytest
from fake_gpu import raw
from fake_loop import Loop, hooks

from lightning_gputime import GPUPhaseHooks, StepTimes
from lightning_gputime._measurement.results import Results
from lightning_gputime._output.summary import summary_of


@pytest.fixture
def timer(loop: Loop) -> GPUPhaseHooks:
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(4))):
            if number == 2:
                with timer.phase("augment"):
                    loop.gpu.work(3.0)
            loop.train(x)
    return timer


def test_pandas_accepts_the_history(timer: GPUPhaseHooks) -> None:
    frame = pandas.DataFrame(timer.history()).set_index("step")
    assert frame.index.tolist() == [0, 1, 2, 3]
    assert frame["backward_ms"].tolist() == [8.0] * 4
    assert math.isnan(frame["augment_ms"][0])


def test_unwritable_path_raises_and_keeps_the_history(timer: GPUPhaseHooks, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Cannot write .*"):
        timer.save(tmp_path / "missing" / "file")
    assert len(timer.history()) == 4


@pytest.mark.parametrize("bad_ms", [math.nan, math.inf, -math.inf])
def test_times_that_are_not_finite_are_null_in_json(bad_ms: float) -> None:
    step = raw(0, data=1.0, forward=2.0, backward=3.0)
    broken = step._replace(device_ms=(1.0, bad_ms, 3.0))
    results = Results(10, warmup_steps=0)
    results.add([broken, broken, step._replace(host_ns=[ns + 10**9 for ns in step.host_ns])])
    json.dumps(summary_of(results).to_dict(), allow_nan=False)


def test_pause_inside_a_step_has_no_phase_in_its_timeline(loop: Loop) -> None:
    newest: list[StepTimes] = []
    with hooks(loop, accumulate_grad_batches=2, observers=[newest.append]) as timer:
        for number, x in enumerate(timer.steps(loop.batches(2))):
            loop.micro_batch(x)
            if number == 0:
                timer._session.batch_ends()
                timer._session.recorder.pause()
                loop.gpu.work(50.0)
                timer._session.recorder.resume()
        loop.update()
    [line] = [step.timeline for step in newest if step.timeline]
    intervals = zip(line.names, line.device_ms, strict=True)
    assert [ms for names, ms in intervals if not names] == [50.0]
