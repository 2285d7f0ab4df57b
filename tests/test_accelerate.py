"""The loops of other libraries, unchanged: Accelerate and Hugging Face's Trainer."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import STEP_MS, steps
from fake_loop import Loop
from processes import run
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gputime import GPUPhaseHooks

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_accelerate_example_times_every_phase(loop: Loop) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(loop.model, loop.optimizer)
    with GPUPhaseHooks(
        model, optimizer, _clock=loop.gpu, accumulate_grad_batches=2, warmup_steps=0
    ) as timer:
        for x in timer.steps(loop.batches(4)):
            with accelerator.accumulate(model):
                loop.gpu.work(0.125)
                out = model(x)
                loop.gpu.work(0.5)
                accelerator.backward(out.sum())
                optimizer.step()
                optimizer.zero_grad()
    twice = {name: 2 * ms for name, ms in {**STEP_MS, "backward": 7.75}.items()}
    assert steps(timer) == [{**twice, "optimizer": 2.0}] * 2
    assert timer.summary().skipped_updates == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "updates"),
    [("test_sync", [2] * 4 + [3] * 4 + [2]), ("test_script", [12] * 8)],
)
def test_accelerate_test_scripts_pass_with_one_step_per_update(
    script: str, updates: list[int]
) -> None:
    pytest.importorskip("accelerate.test_utils")
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    printed = run(*ranks, Path(__file__).parent / "accelerate_run.py", script)
    assert json.loads(printed.splitlines()[-1]) == updates


@pytest.mark.parametrize("given", [{}, {"accumulate_grad_batches": "auto"}], ids=str)
def test_accelerate_accumulation_ends_steps_at_updates(loop: Loop, given: dict[str, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)

    def collate(rows: list[Tensor]) -> Tensor:
        loop.gpu.work(1.0)
        return torch.ones(1, 2)

    data: Any = [torch.ones(2)] * 5
    loader: Any = DataLoader(data, batch_size=1, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(loop.model, loop.optimizer, loader)
    with GPUPhaseHooks(model, optimizer, _clock=loop.gpu, warmup_steps=0, **given) as timer:
        for _ in range(2):
            for x in timer.steps(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).sum())
                    optimizer.step()
                    optimizer.zero_grad()
    # The last two batches of an epoch are an update, too. The loader is one batch ahead.
    found = [(step["data"], step["forward"], step["optimizer"]) for step in steps(timer)]
    assert found == [(4.0, 12.0, 2.0), (1.0, 8.0, 2.0)] * 2
    assert timer.summary().skipped_updates == 0


def test_accelerate_accumulation_continues_across_epochs(loop: Loop) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(loop.model, loop.optimizer)
    with GPUPhaseHooks(model, optimizer, _clock=loop.gpu, warmup_steps=0) as timer:
        for _ in range(2):
            for x in timer.steps(loop.batches(3)):  # Accelerate does not know where these end.
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).sum())
                    optimizer.step()
                    optimizer.zero_grad()
            loop.gpu.work(100.0)  # It is not part of any step.
    assert [step["forward"] for step in steps(timer)] == [8.0] * 3
    assert timer.history()["step_ms"].tolist() == [2 * (1.0 + 4.0 + 7.75) + 2.0] * 3


def test_accelerate_without_accumulation_has_one_step_per_batch(loop: Loop) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(loop.model, loop.optimizer)
    with GPUPhaseHooks(model, optimizer, _clock=loop.gpu, warmup_steps=0) as timer:
        for x in timer.steps(loop.batches(3)):
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert [step["forward"] for step in steps(timer)] == [4.0] * 3


def test_transformers_example_times_every_phase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    main = runpy.run_path(str(EXAMPLES / "huggingface.py"))["main"]
    timer: Any = main(max_steps=8, output_dir=str(tmp_path))
    assert timer.history()["step"].tolist() == list(range(1, 9))
    assert {"data", "forward", "loss", "backward", "optimizer"} <= set(timer.summary().rows)
    assert (timer.history()["backward_ms"] > 0).all()
    assert timer.summary().skipped_updates == 0
    assert str(timer.summary()) in capsys.readouterr().out
