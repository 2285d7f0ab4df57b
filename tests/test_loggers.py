"""Lightning's loggers for real, each read back with its own reader."""

import csv
import json
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import FakeGPU
from fake_lightning import STEP_MS, Model, fit
from lightning.pytorch.loggers import (
    CometLogger,
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)

from lightning_gputime import GPUPhaseTimer

LOGGED = [1, 3, 4]
KEYS = {f"phase_time/{name}_ms": ms for name, ms in STEP_MS.items()}
KEYS["phase_time/step_ms"] = sum(STEP_MS.values())

# What these packages warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


def train(gpu: FakeGPU, *loggers: Logger) -> None:
    timer = GPUPhaseTimer(clock=gpu, summary=False)
    fit(gpu, Model(gpu), n=5, timer=timer, logger=list(loggers), log_every_n_steps=2)


def check(found: dict[str, list[tuple[int, float]]], separator: str = "/") -> None:
    """Checks that every key was logged once for each step that was due, with its mean."""
    for key, ms in KEYS.items():
        assert found[key.replace("/", separator)] == [(step, ms) for step in LOGGED]


def read_csv(logger: CSVLogger) -> dict[str, list[tuple[int, float]]]:
    found = defaultdict(list)
    text = Path(logger.log_dir, "metrics.csv").read_text()
    rows = [row for row in csv.DictReader(text.splitlines()) if row["phase_time/step_ms"]]
    assert len(rows) == len(LOGGED)
    for row in rows:
        for key in KEYS:
            found[key].append((int(row["step"]), float(row[key])))
    return found


def read_tensorboard(logger: TensorBoardLogger) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return {key: [(one.step, one.value) for one in events.Scalars(key)] for key in KEYS}


def test_csv_and_tensorboard_at_once(gpu: FakeGPU, tmp_path: Path) -> None:
    loggers = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
    train(gpu, *loggers)
    check(read_csv(loggers[0]))
    check(read_tensorboard(loggers[1]))


def test_mlflow(gpu: FakeGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    logger = MLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/runs.db")
    train(gpu, logger)
    client: Any = logger.experiment
    run_id = logger.run_id
    check(
        {
            key: [(one.step, one.value) for one in client.get_metric_history(run_id, key)]
            for key in KEYS
        }
    )


def test_wandb_offline(gpu: FakeGPU, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    logger = WandbLogger(offline=True, save_dir=tmp_path)
    train(gpu, logger)
    wandb.finish()
    [path] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(path))
    found = defaultdict(list)
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        row = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for key in KEYS.keys() & row.keys():
            found[key].append((row["trainer/global_step"], row[key]))
    check(found)


def test_comet_offline(gpu: FakeGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("comet_ml")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    logger = CometLogger(online=False, workspace="w", project="p")
    train(gpu, logger)
    logger.experiment.end()
    [path] = tmp_path.glob("*.zip")
    found = defaultdict(list)
    for line in zipfile.ZipFile(path).read("messages.json").decode().splitlines():
        message = json.loads(line)
        metric = message.get("payload", {}).get("metric") or {}
        if metric.get("metricName") in KEYS:
            name = metric["metricName"]
            found[name].append((message["payload"]["step"], float(metric["metricValue"])))
    check(found)
