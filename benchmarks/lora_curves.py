"""The losses of `jaxis train` beside TRL's: adapters of Gemma 3 270M, from its GGUF file, on the rows of sailor.jsonl.

    python -m venv PEERS && PEERS/bin/pip install 'torch==2.13.0' 'transformers>=5,<6' 'peft>=0.21' 'trl>=1.16' gguf
    python benchmarks/lora_curves.py gemma-3-270m-q4_k_m.gguf --peers PEERS/bin/python

Both get the same token ids in the same order, the same adapters at the start, and the same schedule. jaxis computes
with the blocks of the file; TRL's SFTTrainer, with PEFT, with the same weights, dequantized to float32 by gguf-py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "training" / "sailor.yaml"


def main() -> None:
    """Runs both, each in a process of its own, and prints their losses side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="gemma-3-270m-q4_k_m.gguf")
    parser.add_argument("--folder", type=Path, help="where runs are kept; None: they are not")
    parser.add_argument("--peers", default=sys.executable, help="Python of the environment with torch, PEFT and TRL")
    parser.add_argument("--only", choices=("jaxis", "trl"), help="one side, in this process")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if arguments.only is not None:
            (train_jaxis if arguments.only == "jaxis" else train_trl)(arguments.gguf, folder)
            return
        for side, python in (("jaxis", sys.executable), ("trl", arguments.peers)):
            command = [python, __file__, str(arguments.gguf), "--folder", str(folder), "--only", side]
            subprocess.run(command, check=True, cwd=ROOT)
        print_curves(folder)


def train_jaxis(gguf: Path, folder: Path) -> None:
    """Trains with jaxis; leaves metrics.jsonl, the adapters at the start, and the examples of each step."""
    from jaxis.host.progress import ProgressDisplay
    from jaxis.inference.inference_config import read_yaml_mapping
    from jaxis.training.batch_source import GivenBatches
    from jaxis.training.config import TrainConfig
    from jaxis.training.trainable import make_trainable
    from jaxis.training.trainer import Trainer

    values = read_yaml_mapping(CONFIG)
    values["model"]["model_name"] = str(gguf)
    values["training"]["output_dir"] = str(folder / "jaxis")
    config = TrainConfig.of(values)
    trainer = Trainer(config, print)
    start = make_trainable(config, trainer.base, ProgressDisplay(enabled=False))
    (folder / "start").mkdir(parents=True, exist_ok=True)
    start.write(folder / "start", {name: np.asarray(value) for name, value in start.initial.items()})
    del start
    source = trainer.data.source
    assert isinstance(source, GivenBatches)
    batches = source.split.batches
    num_steps = config.training.num_train_epochs * batches.steps_per_epoch
    assert trainer.validation is not None
    held_out = trainer.validation.batches
    examples = {
        "training": values["training"],
        "train": [row for step in range(num_steps) for row in rows_of(batches.batch(step))],
        "held_out": [row for i in range(held_out.steps_per_epoch) for row in rows_of(held_out.batch(i))],
    }
    (folder / "examples.json").write_text(json.dumps(examples))
    trainer.run(ProgressDisplay(enabled=False))


def rows_of(batch: Any) -> list[dict[str, list[int]]]:
    """The token ids of each row of one micro-batch, and as labels those that are learned."""
    rows = []
    for ids, learned, lengths in zip(batch.ids[0], batch.learned[0], batch.seq_lens[0], strict=True):
        length = int(lengths[0])
        if length:
            # `learned` is of the token that follows.
            labels = np.where([False, *learned[: length - 1]], ids[:length], -100)
            rows.append({"input_ids": ids[:length].tolist(), "labels": labels.tolist()})
    return rows


def train_trl(gguf: Path, folder: Path) -> None:
    """Trains with TRL; leaves trl.json, a line a step."""
    import datasets
    import peft
    import tokenizers
    import torch
    import transformers
    import trl

    lines: list[dict[str, float]] = []

    class OrderedTrainer(trl.SFTTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
            loss = super().training_step(*arguments, **keywords)
            lines.append({"step": self.state.global_step + 1, "loss": loss.item()})
            return loss

        def evaluate(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
            metrics = super().evaluate(*arguments, **keywords)
            lines.append({"step": self.state.global_step, "eval_loss": metrics["eval_loss"]})
            return metrics

    examples = json.loads((folder / "examples.json").read_text())
    training = examples["training"]
    # Rows are token ids: what pads them is all that a tokenizer is needed for.
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"0": 0}, unk_token="0"))
    trainer = OrderedTrainer(
        peft.PeftModel.from_pretrained(dequantized_model(gguf), str(folder / "start"), is_trainable=True),
        args=trl.SFTConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=training["per_device_train_batch_size"],
            per_device_eval_batch_size=len(examples["held_out"]),
            num_train_epochs=1,  # which has the rows of all epochs
            **{name: training[name] for name in ("learning_rate", "lr_scheduler_type", "warmup_steps", "eval_steps")},
            eval_strategy="steps",
            save_strategy="no",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
            dataloader_pin_memory=False,
        ),
        train_dataset=datasets.Dataset.from_list(examples["train"]),
        eval_dataset=datasets.Dataset.from_list(examples["held_out"]),
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="0", pad_token="0"),
    )
    trainer.train()
    (folder / "trl.json").write_text(json.dumps(lines))


def dequantized_model(gguf: Path) -> Any:
    """transformers' model of the file's weights in float32; settings are those of the published checkpoint."""
    import gguf as gguf_py
    import torch
    import transformers

    config = transformers.Gemma3TextConfig(
        **{"vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18},
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256},
        **{"max_position_embeddings": 32768, "sliding_window": 512, "tie_word_embeddings": True},
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    model = transformers.Gemma3ForCausalLM(config)
    names = gguf_py.get_tensor_name_map(gguf_py.MODEL_ARCH.GEMMA3, 18)
    tensors = {each.name: each for each in gguf_py.GGUFReader(gguf).tensors}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        tensor = tensors[names.get_name(name, try_suffixes=(".weight",))]
        values = gguf_py.quants.dequantize(tensor.data, tensor.tensor_type)
        # llama.cpp keeps 1 + weight.
        parameter.copy_(torch.from_numpy(values - 1 if name.endswith("norm.weight") else values))
    return model


def print_curves(folder: Path) -> None:
    """Prints the losses of both, and how far they are from each other."""
    ours = [json.loads(line) for line in (folder / "jaxis" / "metrics.jsonl").read_text().splitlines()]
    theirs = json.loads((folder / "trl.json").read_text())
    for name in ("loss", "eval_loss"):
        mine = {line["step"]: line[name] for line in ours if name in line}
        others = {line["step"]: line[name] for line in theirs if name in line}
        print(f"\n{name:>9}      jaxis        TRL  difference")
        for step in sorted(mine.keys() & others.keys()):
            difference = mine[step] / others[step] - 1
            print(f"{step:>9} {mine[step]:>10.5f} {others[step]:>10.5f}  {difference:>+10.2%}")


if __name__ == "__main__":
    main()
