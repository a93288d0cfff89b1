"""The losses of `jaxis train` beside PEFT's: adapters of Gemma 3 270M, from its GGUF file, on the rows of sailor.jsonl.

    python benchmarks/lora_curves.py gemma-3-270m-q4_k_m.gguf

Both get the same token ids in the same order, the same adapters at the start, and the same schedule. jaxis computes
with the blocks of the file; PEFT and torch with the same weights, dequantized to float32 by gguf-py.
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

from jaxis.inference.inference_config import read_yaml_mapping

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "training" / "sailor.yaml"


def main() -> None:
    """Runs both, each in a process of its own, and prints their losses side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="gemma-3-270m-q4_k_m.gguf")
    parser.add_argument("--folder", type=Path, help="where runs are kept; None: they are not")
    parser.add_argument("--only", choices=("jaxis", "torch"), help="one side, in this process")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if arguments.only is not None:
            (train_jaxis if arguments.only == "jaxis" else train_torch)(arguments.gguf, folder)
            return
        for side in ("jaxis", "torch"):
            command = [sys.executable, __file__, str(arguments.gguf), "--folder", str(folder), "--only", side]
            subprocess.run(command, check=True, cwd=ROOT)
        print_curves(folder)


def train_jaxis(gguf: Path, folder: Path) -> None:
    """Trains with jaxis; leaves metrics.jsonl, the adapters at the start, and the examples of each step."""
    from jaxis.host.progress import ProgressDisplay
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
    batches = trainer.data.batches
    num_steps = config.training.num_train_epochs * batches.steps_per_epoch
    assert trainer.validation is not None
    held_out = trainer.validation.batches
    examples = {
        "train": [row for step in range(num_steps) for row in rows_of(batches.batch(step))],
        "held_out": [row for i in range(held_out.steps_per_epoch) for row in rows_of(held_out.batch(i))],
    }
    (folder / "examples.json").write_text(json.dumps(examples))
    trainer.run(ProgressDisplay(enabled=False))


def rows_of(batch: Any) -> list[dict[str, list[int]]]:
    """The token ids of each row of one micro-batch, and which of them are learned."""
    rows = []
    for ids, learned, lengths in zip(batch.ids[0], batch.learned[0], batch.seq_lens[0], strict=True):
        length = int(lengths[0])
        if length:
            # `learned` is of the token that follows.
            mask = [0, *(int(each) for each in learned[: length - 1])]
            rows.append({"input_ids": ids[:length].tolist(), "completion_mask": mask})
    return rows


def train_torch(gguf: Path, folder: Path) -> None:
    """Trains with PEFT and torch; leaves torch.json, a line a step."""
    import peft
    import torch
    import transformers

    examples = json.loads((folder / "examples.json").read_text())
    model = peft.PeftModel.from_pretrained(dequantized_model(gguf), str(folder / "start"), is_trainable=True)
    training = read_yaml_mapping(CONFIG)["training"]
    size = training["per_device_train_batch_size"]
    num_steps = len(examples["train"]) // size
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=training["learning_rate"], weight_decay=0.0)
    schedule = transformers.get_scheduler(
        training["lr_scheduler_type"], optimizer, training["warmup_steps"], num_training_steps=num_steps
    )
    lines = []
    for step in range(num_steps):
        loss = torch_loss(model, examples["train"][step * size : (step + 1) * size])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        lines.append({"step": step + 1, "loss": loss.item()})
        if (step + 1) % training["eval_steps"] == 0:
            with torch.no_grad():
                lines.append({"step": step + 1, "eval_loss": torch_loss(model, examples["held_out"]).item()})
        print(lines[-1], flush=True)
    (folder / "torch.json").write_text(json.dumps(lines))


def torch_loss(model: Any, rows: list[dict[str, list[int]]]) -> Any:
    """The mean loss of the learned tokens of padded rows."""
    import torch

    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    attended, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        tokens, learned = torch.tensor(row["input_ids"]), torch.tensor(row["completion_mask"]) == 1
        ids[i, : len(tokens)], attended[i, : len(tokens)] = tokens, 1
        labels[i, : len(tokens)] = torch.where(learned, tokens, -100)
    causal = model.base_model.model
    hidden = causal.model(input_ids=ids, attention_mask=attended).last_hidden_state
    learned = labels[:, 1:] != -100
    logits = causal.lm_head(hidden[:, :-1][learned])  # 262,144 of each token
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:][learned])


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
    theirs = json.loads((folder / "torch.json").read_text())
    for name in ("loss", "eval_loss"):
        mine = {line["step"]: line[name] for line in ours if name in line}
        others = {line["step"]: line[name] for line in theirs if name in line}
        print(f"\n{name:>9}      jaxis      torch  difference")
        for step in sorted(mine.keys() & others.keys()):
            difference = mine[step] / others[step] - 1
            print(f"{step:>9} {mine[step]:>10.5f} {others[step]:>10.5f}  {difference:>+10.2%}")


if __name__ == "__main__":
    main()
