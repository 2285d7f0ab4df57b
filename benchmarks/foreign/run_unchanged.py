"""Training scripts of others, as they are, by `lightning-gputime run` and without.

    python benchmarks/foreign run_unchanged CHECKOUTS --out benchmarks/results/FILE

CHECKOUTS has the checkouts of several repositories, under their names. Each script runs in a copy,
with made data, twice alone, once by the command, and once where `counted.py` counts its updates
and takes the host's time. For the first three torch is seeded by a `sitecustomize`, and printed
durations, rates and clocks are masked: the words that are the same in both runs alone must be those
of the timed run. What the timer says where a script's own log is printed, is left out.
"""

import argparse
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foreign.__main__ import commit_of
from lightning_gputime import load

PACKAGES = ("lightning", "transformers", "numpy")

_DURATION = re.compile(
    r"\d\d:\d\d:\d\d|ms/batch +[\d.]+|\b[\d.]+ ?m?s\b|[\d.]+it/s|(?:_runtime|_second)\W+[\d.:]+"
)
"""What is masked in the output of all runs."""

_WORDS = "the word {} of a line {} that says nothing\n"


def make_characters(folder: Path) -> None:
    """Make the data set that nanoGPT prepares from a download."""
    made = np.random.default_rng(0)
    for name, size in (("train", 100_000), ("val", 10_000)):
        made.integers(0, 65, size, dtype=np.uint16).tofile(folder / f"{name}.bin")
    letters = {chr(48 + i): i for i in range(65)}
    known = {"vocab_size": 65, "stoi": letters, "itos": {i: a for a, i in letters.items()}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(known))


def make_waves(folder: Path) -> None:
    """Make shorter waves than the script beside it."""
    waves = np.sin(np.arange(100)[None] / 20 + np.arange(40)[:, None]).astype("float64")
    torch.save(waves, folder / "traindata.pt")


def make_citations(folder: Path) -> None:
    """Make papers with words for those of Cora."""
    made = np.random.default_rng(0)
    pairs = [line.split() for line in (folder / "cora.cites").read_text().splitlines()]
    names = sorted({int(name) for pair in pairs for name in pair})
    rows = made.integers(0, 2, (len(names), 200))
    lines = (
        f"{name} {' '.join(map(str, row))} C{name % 7}"
        for name, row in zip(names, rows, strict=True)
    )
    (folder / "cora.content").write_text("\n".join(lines))


def make_text(folder: Path) -> None:
    """Make a text, and a tokenizer of its words with a tiny model's configuration."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import BertConfig, PreTrainedTokenizerFast

    new_tokenizer: Any = PreTrainedTokenizerFast

    text = "".join(_WORDS.format(i % 997, i % 89) for i in range(800))
    (folder / "made.txt").write_text(text)
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[PAD]", "[MASK]", "[CLS]", "[SEP]"]
    words.train_from_iterator([text], trainers.WordLevelTrainer(special_tokens=special))
    kinds = {"pad": "[PAD]", "mask": "[MASK]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}
    tokenizer = new_tokenizer(
        tokenizer_object=words, **{f"{kind}_token": word for kind, word in kinds.items()}
    )
    size = len(tokenizer)
    tiny: Any = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    tokenizer.save_pretrained(folder / "bert")
    BertConfig(vocab_size=size, intermediate_size=64, **tiny).save_pretrained(folder / "bert")


@dataclass(frozen=True)
class Program:
    """A script of others, and how it is run.

    Attributes:
        script: Its path in the folder of checkouts.
        arguments: Its command line.
        root: The folder that is copied, relative to the script's.
        make: What makes its data, by the folder in the copy, relative to the script's.
        launcher: What stands before the script.
    """

    script: str
    arguments: str = ""
    root: str = "."
    make: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()


_NANO = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --dtype=float32"
    " --eval_iters=5 --eval_interval=40 --max_iters=80 --n_layer=2 --n_head=2 --n_embd=32"
    " --block_size=32 --batch_size=8 --dropout=0.0 --log_interval=1"
)
_MASKED = (
    "--config_name bert --tokenizer_name bert --train_file made.txt --do_train --output_dir out"
    " --max_seq_length 32 --per_device_train_batch_size 4 --num_train_epochs 1 --report_to none"
    " --use_cpu --disable_tqdm true --logging_steps 20 --save_strategy no"
)
_MODELS = "transformers/examples/pytorch/language-modeling"
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

PROGRAMS = {
    "regression": Program("examples/regression/main.py"),
    "time_sequence_prediction": Program(
        "examples/time_sequence_prediction/train.py", "--steps 4", make={".": make_waves}
    ),
    "nanoGPT": Program("nanoGPT/train.py", _NANO, make={"data/shakespeare_char": make_characters}),
    "nanoGPT, 4 micro-batches": Program(
        "nanoGPT/train.py",
        f"{_NANO} --gradient_accumulation_steps=4",
        make={"data/shakespeare_char": make_characters},
    ),
    "makemore": Program(
        "makemore/makemore.py", "--max-steps 120 --n-layer 2 --n-embd 32 --num-workers 2"
    ),
    "minGPT adder": Program(
        "minGPT/projects/adder/adder.py", "--trainer.max_iters=120 --trainer.num_workers=1", "../.."
    ),
    "pygcn": Program("pygcn/pygcn/train.py", "--epochs 60", "..", {"../data/cora": make_citations}),
    "TextCNN": Program("nlp-tutorial/2-1.TextCNN/TextCNN.py"),
    "Transformer": Program("nlp-tutorial/5-1.Transformer/Transformer.py"),
    "Lightning, bug report": Program(
        "pytorch-lightning/examples/pytorch/bug_report/bug_report_model.py"
    ),
    "transformers, run_mlm": Program(f"{_MODELS}/run_mlm.py", _MASKED, make={".": make_text}),
    "transformers, run_mlm in 2 processes": Program(
        f"{_MODELS}/run_mlm.py", _MASKED, make={".": make_text}, launcher=_TORCHRUN
    ),
}


class Copy:
    """A program in a folder of its own."""

    def __init__(self, checkouts: Path, program: Program, folder: Path) -> None:
        script = checkouts / program.script
        root = (script.parent / program.root).resolve()
        shutil.copytree(root, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))
        self._script = folder / script.resolve().relative_to(root)
        self._program, self._root = program, folder
        for place, make in program.make.items():
            target = self._script.parent / place
            target.mkdir(parents=True, exist_ok=True)
            make(target)

    def run(self, *first: str, **environment: str) -> tuple[int, str, list[str]]:
        """Run it; return its exit code, the words that it printed, and the lines it has said."""
        program = self._program
        words = [sys.executable, *first, *program.launcher, self._script.name]
        words += program.arguments.split()
        paths = [environment.pop("PYTHONPATH", ""), str(self._root), os.environ["PYTHONPATH"]]
        given = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",  # The order of a set of labels decides on losses.
            "HF_HOME": str(self._root),
            # Waves are a file of numpy's.
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        }
        done = subprocess.run(
            words,
            cwd=self._script.parent,
            capture_output=True,
            text=True,
            timeout=900,
            env={**os.environ, **given, **environment, "PYTHONPATH": os.pathsep.join(paths)},
        )
        return done.returncode, done.stdout, done.stderr.splitlines()


def same_words(one: str, two: str, timed: str) -> dict[str, int | bool]:
    """Compare what was printed without the timer, twice, with what was printed with it."""
    alone, again, with_timer = (_DURATION.sub("-", text).split() for text in (one, two, timed))
    fixed = [word == other for word, other in zip(alone, again, strict=False)]
    pairs = zip(alone, with_timer, fixed, strict=False)
    is_same = len(alone) == len(again) == len(with_timer) and all(
        word == other for word, other, is_fixed in pairs if is_fixed
    )
    return {"words": len(alone), "compared": sum(fixed), "same_output": is_same}


def counted(folder: Path) -> dict[str, Any]:
    """Return what `counted.py` found on the first rank, the times per update of an optimizer."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    first = [one for one in found if one["rank"] == "0"]
    if len(first) != 1:
        return {"updates": [], "processes": len(found)}
    [one] = first
    steps = max((n for _, n in one["updates"]), default=0)
    means = {name: round(ms / max(steps, 1), 4) for name, ms in one["total_ms"].items()}
    return {"updates": one["updates"], "counts": one["counts"], "counted_ms": means}


def run(checkouts: Path, program: Program, scratch: Path) -> dict[str, Any]:
    """Run one program in its ways; return what was found."""
    copies = iter(range(9))

    def copy() -> Copy:
        return Copy(checkouts, program, scratch / str(next(copies)))

    saved, results, seeds = scratch / "run.json.gz", scratch / "counted", scratch / "seeds"
    results.mkdir()
    seeds.mkdir()
    (seeds / "sitecustomize.py").write_text("import torch\ntorch.manual_seed(0)\n")
    shutil.copy(Path(__file__).with_name("counted.py"), results / "sitecustomize.py")
    code, alone, told = copy().run(PYTHONPATH=str(seeds))
    _, again, _ = copy().run(PYTHONPATH=str(seeds))
    command = ["-m", "lightning_gputime", "run", "--every-n-steps", "1"]
    command += ["--save-path", str(saved)]
    timed_code, timed, timed_told = copy().run(*command, PYTHONPATH=str(seeds))
    lines = [line for line in timed.splitlines() if "lightning_gputime" not in line]
    copy().run(PYTHONPATH=str(results), COUNTED=str(results))
    said = [line for line in timed_told if line not in told]
    found = {
        "exit_codes": [code, timed_code],
        **same_words(alone, again, "\n".join(lines)),
        "messages": [line for line in said if "lightning_gputime" in line],
        **counted(results),
        "steps": 0,
    }
    if code:
        found["error"] = told[-5:]
    if saved.exists():
        kept = load(saved).summary()
        found |= {
            "steps": kept.warmup_steps + kept.steps,
            "timer_ms": {name: round(one.mean_ms, 4) for name, one in kept.rows.items()},
        }
    return found


def measure(checkouts: Path, arguments: list[str]) -> dict[str, Any]:
    """Run the programs; return what was found of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    known = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for name in known.programs:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = run(checkouts, PROGRAMS[name], Path(folder))
        print(name, json.dumps(found[name], indent=1), flush=True)
    used = {PROGRAMS[name].script.split("/")[0] for name in known.programs}
    return {
        "commits": {name: commit_of(checkouts / name) for name in sorted(used)},
        "results": found,
    }
