"""Steps of LoRA training beside TRL on torch: tokens per second, and peak memory.

    python benchmarks/random_checkpoint.py FOLDER
    python -m venv PEERS && PEERS/bin/pip install 'torch==2.13.0' 'transformers>=5,<6' 'peft>=0.21' 'trl>=1.16'
    python benchmarks/training.py FOLDER --peers PEERS/bin/python [--dtype bfloat16]

Both train the same layers at the same rank, on the same rows, all of whose tokens are learned, in a process each. The
first step, in which programs are compiled, does not count.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 10_000
RANK, ALPHA = 8, 16
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def rows_of(options: argparse.Namespace) -> np.ndarray:
    """Token ids [rows, tokens]."""
    return np.random.default_rng(0).integers(0, VOCABULARY, (options.rows, options.tokens))


def jaxis_steps(options: argparse.Namespace, done: Callable[[float], None]) -> None:
    """Steps of jaxis; calls `done` with the loss of each."""
    import jax

    from jaxis.config.hf_config import HFConfig
    from jaxis.host.progress import ProgressDisplay
    from jaxis.tokenizer import Tokenizer
    from jaxis.training.base_model import BaseModel
    from jaxis.training.batches import Batches, BatchShape
    from jaxis.training.config import TrainConfig
    from jaxis.training.examples import Example
    from jaxis.training.objectives import CrossEntropy
    from jaxis.training.optimizer import make_optimizer
    from jaxis.training.step import begin, make_step
    from jaxis.training.trainable import make_trainable

    path, dtype = options.checkpoint, jax.numpy.dtype(options.dtype)
    config = TrainConfig.of(
        {
            "data": {"train": {"datasets": [{"dataset_path": "none.jsonl"}]}},
            "training": {
                "use_peft": True,
                "enable_gradient_checkpointing": options.recompute,
                "forward_pass": options.forward_pass,
            },
            "peft": {"lora_r": RANK, "lora_alpha": ALPHA, "lora_target_modules": LAYERS},
        }
    )
    # Rows are token ids: the checkpoint needs no tokenizer.
    tokenizer = object.__new__(Tokenizer)
    base = BaseModel(path, str(path), HFConfig.from_folder(path), tokenizer, {}, options.tokens, dtype, None)
    model = make_trainable(config, base, ProgressDisplay(enabled=False))
    items = [(Example(row.astype(np.int32), np.arange(len(row)) > 0, ""),) for row in rows_of(options)]
    batch = Batches(items, BatchShape(1, options.rows, options.tokens), seed=None).batch(0)
    optimizer = make_optimizer(config.training, lambda _: jax.numpy.asarray(1e-4))
    step = make_step(model.forward(is_training=True), CrossEntropy(), model.combine, optimizer, 1.0)
    trained, state = begin(model.initial, model.frozen, optimizer)
    key = jax.random.key(0)
    for _ in range(options.steps + 1):
        trained, state, reported = step(trained, model.frozen, state, batch, key)
        done(float(reported["loss"]))


def trl_steps(options: argparse.Namespace, done: Callable[[float], None]) -> None:
    """Steps of TRL's SFTTrainer; calls `done` with the loss of each."""
    import datasets
    import peft
    import tokenizers
    import torch
    import transformers
    import trl

    class TimedTrainer(trl.SFTTrainer):
        def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
            loss = super().training_step(*arguments, **keywords)
            done(loss.item())
            return loss

    rows = rows_of(options).tolist()
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="0", pad_token="0")
    model = transformers.AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=getattr(torch, options.dtype))
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model,
            args=trl.SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=options.rows,
                max_steps=options.steps + 1,
                max_length=options.tokens,
                learning_rate=1e-4,
                lr_scheduler_type="constant",
                gradient_checkpointing=options.recompute,
                bf16=False,
                use_cpu=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataset_kwargs={"skip_prepare_dataset": True},
                dataloader_pin_memory=False,
            ),
            train_dataset=datasets.Dataset.from_list(
                [{"input_ids": row, "labels": row} for _ in range(options.steps + 1) for row in rows]
            ),
            processing_class=tokenizer,
            peft_config=peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LAYERS, task_type="CAUSAL_LM"),
        )
        trainer.train()


SYSTEMS = {"jaxis": jaxis_steps, "trl": trl_steps}


def measure(name: str, options: argparse.Namespace) -> None:
    """Prints a row of the table."""
    losses, times = [], [time.perf_counter()]

    def done(loss: float) -> None:
        losses.append(loss)
        times.append(time.perf_counter())

    SYSTEMS[name](options, done)
    seconds = statistics.median(np.diff(times)[1:])
    rate = options.rows * options.tokens / seconds
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"| {name} | {options.dtype} | {rate:.1f} tokens/s | {peak_bytes / 2**30:.2f} GiB | "
        f"losses {losses[0]:.4f} to {losses[-1]:.4f} |",
        flush=True,
    )


def main() -> None:
    """Measures each system in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--peers", default=sys.executable, help="Python of the environment with torch, PEFT and TRL.")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--recompute", action="store_true", help="Compute layers again for their derivatives.")
    parser.add_argument("--forward-pass", default="plain", choices=("plain", "engine"), help="Of jaxis.")
    parser.add_argument("--systems", default="jaxis,trl")
    options = parser.parse_args()
    names = options.systems.split(",")
    if len(names) == 1:
        measure(names[0], options)
        return
    for name in names:
        python = sys.executable if name == "jaxis" else options.peers
        subprocess.run([python, *sys.argv, "--systems", name], check=True)


if __name__ == "__main__":
    main()
