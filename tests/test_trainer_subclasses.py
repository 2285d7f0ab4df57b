"""Trainers of TRL, PEFT and sentence-transformers, which derive from that of transformers.

Each trains a tiny model. Packages that are not installed are skipped.
"""

import copy
import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import hooks_of, is_patched

transformers: Any = pytest.importorskip("transformers")

from test_huggingface import PATCHED  # noqa: E402

from lightning_gputime.huggingface import TransformersPhaseTimer  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # These packages warn.
    pytest.mark.usefixtures("one_thread"),
]

UPDATES, MICRO_BATCHES, SLEEP_MS = 6, 2, 10.0

OPTIONS = {
    "max_steps": UPDATES,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "seed": 1,
}

USUAL = {"data", "other", "forward", "loss", "backward", "optimizer", "callbacks"}


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefghijklm"])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def rows(**columns: Any) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(
        {name: values * 20 for name, values in columns.items()}
    )


def reward(completions: list[Any], **_: Any) -> list[float]:
    time.sleep(SLEEP_MS / 1e3)
    return [float(len(item)) for item in completions]


def trl(kind: str, path: Path, callbacks: list[Any]) -> Any:
    library = pytest.importorskip("trl")
    options, others = dict(OPTIONS), dict[str, Any]()
    if kind == "SFT":
        data = rows(text=["a b c d e f", "g h i j k l"])
    elif kind == "DPO":
        data = rows(prompt=["a b c"], chosen=["d e f"], rejected=["g h"])
        others["ref_model"] = llama()
    else:
        data = rows(prompt=["a b c", "d e"])
        options |= {"num_generations": 2, "max_completion_length": 8, "steps_per_generation": 1}
        others["reward_funcs"] = reward
    return getattr(library, f"{kind}Trainer")(
        llama(),
        args=getattr(library, f"{kind}Config")(str(path), **options),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer(),
        callbacks=callbacks,
        **others,
    )


def lora(path: Path, callbacks: list[Any]) -> Any:
    peft = pytest.importorskip("peft")
    row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    torch.manual_seed(0)
    model = peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(path), **OPTIONS),
        train_dataset=[row] * 40,
        eval_dataset=[row] * 4,
        callbacks=callbacks,
    )


def sentences(path: Path, callbacks: list[Any]) -> Any:
    st = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"vocab_size": 16, "intermediate_size": 32, "max_position_embeddings": 32}
    inside = path / "bert"
    transformers.BertModel(transformers.BertConfig(**config, **sizes)).save_pretrained(inside)
    tokenizer().save_pretrained(inside)
    kinds = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    layers = [kinds.Transformer(str(inside)), kinds.Pooling(16)]
    # These buffers are not in the file. After many other tests of the process, they were
    # uninitialized before any timer existed.
    buffers = {name.rpartition(".")[2]: value for name, value in layers[0].named_buffers()}
    buffers["position_ids"].copy_(torch.arange(32))
    buffers["token_type_ids"].zero_()
    model = st.SentenceTransformer(modules=layers, device="cpu")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    data = rows(anchor=["a b", "c d"], positive=["a c", "d e"])
    return st.SentenceTransformerTrainer(
        model,
        st.SentenceTransformerTrainingArguments(str(path), **OPTIONS),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        loss=losses.MultipleNegativesRankingLoss(model),
        callbacks=callbacks,
    )


@pytest.mark.parametrize(
    ("make", "more_phases"),
    [
        pytest.param(partial(trl, "SFT"), set(), id="sft"),
        pytest.param(partial(trl, "DPO"), set(), id="dpo"),
        pytest.param(partial(trl, "GRPO"), {"generate", "reward"}, id="grpo"),
        pytest.param(lora, set(), id="lora"),
        pytest.param(sentences, set(), id="sentences"),
    ],
)
def test_trainer_subclass_is_timed_and_trains_the_same(
    make: Callable[..., Any], more_phases: set[str], tmp_path: Path
) -> None:
    losses, hook_counts = {}, {}
    timer = TransformersPhaseTimer(print_summary=False, warmup_steps=0)
    for name, callbacks in {"with": [timer], "without": []}.items():
        torch.manual_seed(0)
        trainer = make(tmp_path / name, callbacks)
        patched = (type(trainer), transformers.Trainer, transformers.GenerationMixin)
        # `train` stays replaced while a timer exists.
        before = [{**vars(kind), "train": None} for kind in patched]
        attributes = {*vars(trainer)}
        trainer.train()
        assert [{**vars(kind), "train": None} for kind in patched] == before
        assert not {*vars(trainer)} & METHODS - attributes
        assert all("_loss_function" not in vars(module) for module in trainer.model.modules())
        # TRL's trainers leave hooks.
        hook_counts[name] = [
            {key: len(value[0]) if isinstance(value, tuple) else 0 for key, value in model.items()}
            for model in hooks_of(trainer.model)
        ]
        history = copy.deepcopy(trainer.state.log_history)
        losses[name] = [
            entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry
        ]
        if callbacks:
            logged = [log for log in history if "loss" in log]
    assert len(losses["with"]) == UPDATES + UPDATES // 2
    assert losses["with"] == losses["without"]
    assert hook_counts["with"] == hook_counts["without"]

    rows = timer.history()
    assert rows["step"].tolist() == [*range(1, UPDATES + 1)]
    others = ("step", "step_ms", "host_wait_ms")
    phases = [name for name in rows.dtype.names or () if "/" not in name and name not in others]
    assert {name.removesuffix("_ms") for name in phases} == USUAL | more_phases
    for row, log in zip(rows, logged, strict=True):
        found = {name: row[name] for name in phases if row[name] == row[name]}
        assert sum(found.values()) == pytest.approx(row["step_ms"])
        # Only the first step has no callbacks.
        assert len(found) >= len(phases) - 1
        assert all(log[f"phase_time/{name}"] == pytest.approx(ms) for name, ms in found.items())
    if "reward" in more_phases:
        assert all(rows["reward_ms"] >= MICRO_BATCHES * SLEEP_MS)
        assert all(rows["reward_ms"] < rows["step_ms"] / 2 + MICRO_BATCHES * SLEEP_MS)
    evaluations = timer._run().evaluations
    assert [evaluation["step"] for evaluation in evaluations] == [2, 4, 6]
    assert all(("reward_ms" in item) == ("reward" in more_phases) for item in evaluations)
    classes = patched[:2]
    del timer, trainer, callbacks
    gc.collect()
    assert not any(is_patched(cls.train) for cls in classes)


METHODS = PATCHED | {"_calculate_rewards"}
"""Attributes that are replaced on a Trainer while it trains."""
