"""The losses of `jaxis train` beside TRL's: adapters of Gemma 3 270M, from its GGUF file, on the rows of sailor.jsonl.

    pip install trl
    python benchmarks/lora_curves.py gemma-3-270m-q4_k_m.gguf

Both get the same token ids in the same order, the same adapters at the start, and the same schedule. jaxis computes
with the blocks of the file; TRL and PEFT with the same weights, dequantized to float32 by gguf-py.
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
    parser.add_argument("--only", choices=("jaxis", "trl"), help="one side, in this process")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if arguments.only is not None:
            (train_jaxis if arguments.only == "jaxis" else train_trl)(arguments.gguf, folder)
            return
        for side in ("jaxis", "trl"):
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


def train_trl(gguf: Path, folder: Path) -> None:
    """Trains with TRL and PEFT; leaves trl.json, the history of its log."""
    import peft
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    examples = json.loads((folder / "examples.json").read_text())
    model = peft.PeftModel.from_pretrained(dequantized_model(gguf), str(folder / "start"), is_trainable=True)
    training = read_yaml_mapping(CONFIG)["training"]
    size = training["per_device_train_batch_size"]
    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=size,
        per_device_eval_batch_size=len(examples["held_out"]),
        max_steps=len(examples["train"]) // size,
        learning_rate=training["learning_rate"],
        lr_scheduler_type=training["lr_scheduler_type"],
        warmup_steps=training["warmup_steps"],
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=training["eval_steps"],
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        completion_only_loss=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
    )

    class InOrder(SFTTrainer):
        """Takes rows in the order in which they are."""

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset if dataset is None else dataset)

    trainer = InOrder(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list(examples["train"]),
        eval_dataset=Dataset.from_list(examples["held_out"]),
        processing_class=any_tokenizer(),
    )
    trainer.train()
    (folder / "trl.json").write_text(json.dumps(trainer.state.log_history))


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


def any_tokenizer() -> Any:
    """A tokenizer, which TRL wants although the rows are token ids; it only pads with it."""
    import tokenizers
    import transformers

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


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
