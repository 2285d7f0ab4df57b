"""The training setup that a timer finds: model, loaders, cores, precision and optimizers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import FakeGPU
from fake_lightning import Model, fit, timer_of, trainer
from fake_loop import Loop, hooks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from lightning_gputime._runs.environment import _unfused, cores_of_rank, loader_settings


def test_cores_are_shared_by_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [cores_of_rank(ranks) for ranks in (1, 4, 8, 32)] == [64, 16, 8, 8]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cores_of_rank(32) == 32


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 64), ("250000 100000", 2), ("50000 100000", 1), ("", 64)]
)
def test_quota_of_a_container_limits_the_cores(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr("lightning_gputime._runs.environment._CPU_QUOTA", tmp_path / "cpu.max")
    assert cores_of_rank(1) == cores


def test_setup_has_the_kind_of_dataset() -> None:
    in_memory = TensorDataset(torch.zeros(8, 2))
    settings = loader_settings(DataLoader(Subset(in_memory, [0, 1])))
    assert (settings["is_in_memory"], settings["is_iterable"]) == (True, False)
    settings = loader_settings([loader(), DataLoader(Endless())])
    assert (settings["is_in_memory"], settings["is_iterable"]) == (False, True)
    other: Any = [1, 2]
    assert not loader_settings(DataLoader(other))["is_in_memory"]


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.zeros(8, 2))


def test_setup_has_the_loader_of_an_evaluation(gpu: FakeGPU) -> None:
    timer, data = timer_of(gpu), torch.zeros(8, 2)
    trainer(timer).validate(Model(gpu), DataLoader(data, batch_size=4), verbose=False)  # type: ignore[arg-type]
    setup = timer._evaluations.results["val"].setup
    assert (setup.has_loader, setup.num_workers, setup.batch_size) == (True, 0, 4)


def loader(**options: Any) -> Any:
    return DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4, **options)


def test_setup_has_the_loader_of_a_plain_loop(loop: Loop) -> None:
    with hooks(loop) as timer:
        for _ in timer.steps(loader()):
            loop.gpu.host_work(50.0)
            loop.train(torch.zeros(1, 2))
    setup = timer._results.setup
    assert (setup.num_workers, setup.pin_memory, setup.persistent_workers) == (0, False, False)
    assert (setup.batch_size, setup.prefetch_factor, setup.has_loader) == (4, None, True)


@pytest.mark.parametrize(
    ("loaders", "workers", "pinned"),
    [
        ({"a": loader(), "b": loader()}, 0, False),
        ([loader(), loader(num_workers=2)], None, False),
        ([torch.zeros(1)] * 3, None, None),
        ([torch.zeros(1)] * 1000, None, None),
        ((), None, None),
        (loader(num_workers=2), 2, False),
    ],
)
def test_setup_has_a_setting_only_if_all_loaders_agree(
    loaders: Any, workers: int | None, pinned: bool | None
) -> None:
    settings = loader_settings(loaders)
    assert (settings["num_workers"], settings["pin_memory"]) == (workers, pinned)


class MalformedLoader:
    """A loader whose attributes have another type or raise."""

    num_workers = "many"

    @property
    def pin_memory(self) -> bool:
        raise RuntimeError("not yet")

    def __iter__(self) -> Any:
        return iter([torch.zeros(1, 2)] * 3)


def test_setup_ignores_malformed_attributes_of_a_custom_loader(loop: Loop) -> None:
    with hooks(loop) as timer:
        for x in timer.steps(MalformedLoader()):
            loop.train(x)
    setup = timer._results.setup
    assert (setup.num_workers, setup.pin_memory, setup.has_loader) == (None, None, True)
    assert timer.summary().steps == 3


def test_setup_has_the_precision_of_the_trainer(gpu: FakeGPU) -> None:
    timer = fit(gpu, Model(gpu))
    assert timer._results.setup.precision == "32-true"
    assert not timer._results.setup.has_bf16


def test_setup_names_optimizers_that_could_be_fused() -> None:
    weights = [nn.Parameter(torch.zeros(1))]
    adamw, sgd = torch.optim.AdamW(weights), torch.optim.SGD(weights)
    fused, lbfgs = torch.optim.AdamW(weights, fused=True), torch.optim.LBFGS(weights)
    for device_type, name_of_sgd in (("cpu", ""), ("cuda", "SGD")):
        assert _unfused([adamw], device_type) == "AdamW"
        assert _unfused([sgd], device_type) == name_of_sgd
        assert [_unfused(given, device_type) for given in ([], [fused], [lbfgs])] == [""] * 3
    assert _unfused([adamw], "mps") == ""
    assert _unfused([SimpleNamespace(param_groups=["custom"])], "cuda") == ""
