"""Loggers, most of which are read back with their own reader."""

import csv
import importlib
import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import STEP_MS, FakeGPU
from fake_lightning import Loader, Model, fit, timer_of, trainer
from fake_loop import Loop
from fake_loop import train as train_loop
from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)

from lightning_gputime._output.loggers import LogWriter

LOGGED = [1, 3, 4]  # Steps at which the means of `MEANS_MS` are logged.
MEANS_MS = {f"phase_time/{name}_ms": ms for name, ms in STEP_MS.items()}
MEANS_MS["phase_time/step_ms"] = sum(STEP_MS.values())

# Ignore warnings of these packages.
pytestmark = pytest.mark.filterwarnings("ignore")


def train(gpu: FakeGPU, *loggers: Logger) -> None:
    timer = timer_of(gpu, warmup_steps=5)
    fit(gpu, Model(gpu), n=5, timer=timer, logger=list(loggers), log_every_n_steps=2)


def assert_means(found: dict[str, list[tuple[int, float]]]) -> None:
    """Check that every mean was logged once for each step that was due."""
    for key, ms in MEANS_MS.items():
        assert found[key] == [(step, ms) for step in LOGGED]


def read_csv(logger: CSVLogger) -> list[dict[str, str]]:
    return [*csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())]


def events_of(logger: TensorBoardLogger) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return events


def test_csv_and_tensorboard_store_every_mean(gpu: FakeGPU, tmp_path: Path) -> None:
    in_csv, in_tensorboard = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
    train(gpu, in_csv, in_tensorboard)
    rows = [row for row in read_csv(in_csv) if row["phase_time/step_ms"]]
    assert len(rows) == len(LOGGED)
    assert_means({key: [(int(row["step"]), float(row[key])) for row in rows] for key in MEANS_MS})
    events = events_of(in_tensorboard)
    assert_means(
        {key: [(event.step, event.value) for event in events.Scalars(key)] for key in MEANS_MS}
    )


def test_tensorboard_charts_all_phases_and_the_step(gpu: FakeGPU, tmp_path: Path) -> None:
    from tensorboard.plugins.custom_scalar import layout_pb2

    logger, model = TensorBoardLogger(tmp_path), Model(gpu)
    timer = timer_of(gpu)
    fit(gpu, model, n=5, timer=timer, logger=logger, log_every_n_steps=2)
    trainer(timer, logger=logger).validate(model, Loader(gpu, 2), verbose=False)
    events = events_of(logger)
    [event] = events.Tensors("custom_scalars__config__")
    [category] = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]).category
    assert category.title == "phase_time"
    shown = {
        chart.title: {
            tag
            for tag in events.Tags()["scalars"]
            if any(re.compile(item).match(tag) for item in chart.multiline.tag)
        }
        for chart in category.chart
    }
    assert shown == {
        "phases (ms)": {f"phase_time/{name}_ms" for name in (*STEP_MS, "callbacks")},
        "step (ms)": {"phase_time/step_ms"},
    }


def test_tensorboard_shows_phases_and_step_in_the_first_group(gpu: FakeGPU, tmp_path: Path) -> None:
    logger, flat = TensorBoardLogger(tmp_path), CSVLogger(tmp_path)
    timer = timer_of(gpu, log="all", warmup_steps=5)
    runner = trainer(timer, logger=[logger, flat], log_every_n_steps=1)
    runner.fit(Model(gpu), Loader(gpu, 3), Loader(gpu, 2))
    groups: dict[str, set[str]] = defaultdict(set)
    for tag in events_of(logger).Tags()["scalars"]:
        group, _, name = tag.partition("/")
        groups[group].add(name)
    assert groups["phase_time"] == {f"{name}_ms" for name in (*STEP_MS, "callbacks", "step")}
    assert groups["phase_time_val"] >= {"data_ms", "forward_ms", "host_wait_ms"}
    assert groups["phase_time_host"] == {"host_wait_ms"}
    assert groups["phase_time_parts"] == {"data/copy_ms", "data/fetch_ms"}
    assert groups["phase_time_fit"] >= {"steps_share", "wall_s"}
    # Other loggers have the documented keys.
    assert {"phase_time/val/forward_ms", "phase_time/host_wait_ms"} < {*read_csv(flat)[0]}
    assert runner.callback_metrics["phase_time/val/forward_ms"] == 4.0


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("forward_ms", "a/b/forward_ms"),
        ("slow/garbage_collection_ms", "a_slow/b/garbage_collection_ms"),
        ("ranks/forward_max_ms", "a_ranks/b/forward_max_ms"),
        ("backward/comm_ms", "a_comm/b/backward/comm_ms"),
        ("data/copy/pin_ms", "a_parts/b/data/copy/pin_ms"),
    ],
)
def test_tensorboard_group_precedes_the_first_slash(name: str, tag: str) -> None:
    writer = Writer()
    LogWriter("a/b", [writer], row={"epoch": 0}).write({name: 1.0}, 3)
    assert writer.logged == [({tag: 1.0}, 3)]


class Writer:
    """A logger that is also its experiment, in place of TensorBoard's writer."""

    def __init__(self) -> None:
        self.experiment = self
        self.logged: list[tuple[dict[str, float], int]] = []
        self.layouts: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((metrics, step))

    def add_custom_scalars(self, layout: Any) -> None:
        self.layouts.append(layout)


def test_plain_loop_adds_the_chart_once_and_survives_a_failing_writer(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Writer):
        def add_custom_scalars(self, layout: Any) -> None:
            raise OSError("full")

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            raise OSError("full")

    writer, fails = Writer(), Fails()
    train_loop(loop, 3, logger=[fails, writer], log_every_n_steps=1, prefix="a.b")
    [layout] = writer.layouts
    assert layout["a.b"]["step (ms)"] == ["Multiline", [r"^a\.b/step_ms$"]]
    assert len(writer.logged) == 3
    assert caplog.text.count("Cannot log phase times") == 1


def test_csv_rows_have_the_epoch_of_their_step(gpu: FakeGPU, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    timer = timer_of(gpu, warmup_steps=5)
    runner = trainer(timer, logger=logger, max_epochs=3, log_every_n_steps=2)
    runner.fit(Model(gpu), Loader(gpu, 3), Loader(gpu, 1))
    rows = read_csv(logger)
    found = [(row["step"], row["epoch"]) for row in rows if row["phase_time/step_ms"]]
    # Steps 2, 5 and 8 are the last of their epochs. Step 5 is read in the next epoch.
    assert found == [("1", "0"), ("3", "1"), ("5", "1"), ("7", "2"), ("8", "2")]
    assert [row["epoch"] for row in rows if row["phase_time/val/step_ms"]] == ["0", "1", "2"]


def test_mlflow_stores_means(gpu: FakeGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    logger = MLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/runs.db")
    train(gpu, logger)
    client: Any = logger.experiment
    logs = {key: client.get_metric_history(logger.run_id, key) for key in MEANS_MS}
    assert_means({key: [(log.step, log.value) for log in logs[key]] for key in MEANS_MS})


def test_wandb_stores_every_mean_offline(gpu: FakeGPU, tmp_path: Path) -> None:
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
        for key in MEANS_MS.keys() & row.keys():
            found[key].append((row["trainer/global_step"], row[key]))
    assert_means(found)


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """Yield the records of W&B's offline file: a header of 7 bytes, then LevelDB's log format.

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
        if kind in (1, 4):  # A complete record, or the last part.
            yield record
            record = b""
