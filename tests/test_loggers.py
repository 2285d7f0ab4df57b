"""Lightning's loggers for real, each read back with its own reader."""

import copy
import csv
import importlib
import json
import pickle
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import STEP_MS, FakeGPU
from fake_lightning import Model, fit
from fake_loop import Loop, hooks
from lightning.pytorch.loggers import (
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
    proto: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found = defaultdict(list)
    for data in leveldb_log(path.read_bytes()):
        record = proto.Record()
        record.ParseFromString(data)
        row = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for key in KEYS.keys() & row.keys():
            found[key].append((row["trainer/global_step"], row[key]))
    check(found)


def test_comet_offline(gpu: FakeGPU, tmp_path: Path) -> None:
    comet_ml = pytest.importorskip("comet_ml")
    # Comet's own experiment: Lightning's CometLogger stores nothing when it is offline.
    experiment = comet_ml.OfflineExperiment(offline_directory=str(tmp_path), project_name="p")
    loop = Loop(gpu)
    with hooks(loop, logger=experiment, log_every_n_steps=2) as timer:
        for x in timer.steps(loop.batches(5)):
            loop.train(x)
    experiment.end()
    [path] = tmp_path.glob("*.zip")
    found = defaultdict(list)
    for line in zipfile.ZipFile(path).read("messages.json").decode().splitlines():
        metric = json.loads(line).get("payload", {}).get("metric") or {}
        if metric.get("metricName") in KEYS:
            values = (metric["step"], float(metric["metricValue"]))
            found[metric["metricName"]].append(values)
    check(found)


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """Yields the records of W&B's offline file: a header of 7 bytes, then LevelDB's log format.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    block, position, record = 32768, 7, b""
    while position + 7 <= len(data):
        if block - position % block < 7:
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_a_logger_is_copied_and_pickled_while_a_timer_looks_at_it(
    loop: Loop, tmp_path: Path
) -> None:
    logger = CSVLogger(tmp_path / "own")
    with hooks(loop, logger=logger):
        assert "log_metrics" in vars(logger)
        copies = [copy.deepcopy([logger])[0], pickle.loads(pickle.dumps(logger))]
    assert "log_metrics" not in vars(logger)
    for one in copies:
        # It logs to itself.
        one.log_metrics({"loss": 1.0}, step=0)
        assert one.experiment.metrics == [{"loss": 1.0, "step": 0}]
    assert logger.experiment.metrics == []
