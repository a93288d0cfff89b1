"""TRL and PEFT: the trainers whose keys jaxis reads, on the token ids that jaxis made of the data rows.

    python -m peers.trl_peer REQUEST.json

Prints a JSON object for each step: loss, seconds and tokens, and the peak of memory so far.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
import trl


class Timed(transformers.TrainerCallback):
    """Prints each step; `tokens` counts those that a trainer computed in it."""

    def __init__(self) -> None:
        self.tokens, self._start = 0, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.tokens, self._start = 0, time.perf_counter()

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            values = {"loss": logs["loss"]}
            measured = {"seconds": time.perf_counter() - self._start, "tokens": self.tokens}
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({**values, **measured, "peak_memory_bytes": peak}), flush=True)


def shared(request: dict[str, Any], folder: str) -> dict[str, Any]:
    """Arguments that all of TRL's configurations have."""
    training = request["training"]
    return {
        **{name: training[name] for name in ("max_steps", "learning_rate", "per_device_train_batch_size")},
        "lr_scheduler_type": training["lr_scheduler_type"],
        "gradient_checkpointing": training["enable_gradient_checkpointing"],
        "output_dir": folder,
        "logging_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def counting(trainer: type[transformers.Trainer], timed: Timed) -> type[transformers.Trainer]:
    """Returns a trainer that counts the tokens of its losses."""

    class Counting(trainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
            for name in ("attention_mask", "prompt_mask", "completion_mask"):
                timed.tokens += int(inputs[name].sum()) if name in inputs else 0
            return super().compute_loss(model, inputs, *arguments, **keywords)

    return Counting


def make_trainer(request: dict[str, Any], timed: Timed, folder: str) -> transformers.Trainer:
    """Makes the trainer of TRL that is of the request's kind."""
    training, rows = request["training"], datasets.Dataset.from_list(request["rows"])
    model = transformers.AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(request["model"], padding_side="left")
    arguments = shared(request, folder)
    common = {
        "model": model,
        "train_dataset": rows,
        "processing_class": tokenizer,
        "peft_config": peft.LoraConfig(task_type="CAUSAL_LM", **request["lora"]),
        "callbacks": [timed],
    }
    kind, given = training["trainer_type"], training["distillation"]
    if kind == "TRL_SFT":
        args = trl.SFTConfig(
            **arguments, max_length=None, loss_type="nll", dataset_kwargs={"skip_prepare_dataset": True}
        )
        return counting(trl.SFTTrainer, timed)(args=args, **common)

    class Given(counting(trl.DistillationTrainer, timed)):
        """Learns answers that are given: their token ids are in the prompt's place."""

        def _generate(self, prompts: list[Any]) -> Any:
            ids = [json.loads(prompt) for prompt in prompts]
            return [each[:1] for each in ids], [each[1:] for each in ids], None, None, None

    args = trl.DistillationConfig(
        **arguments,
        max_completion_length=given["max_completion_length"],
        beta=given["beta"],
        temperature=given["temperature"],
    )
    teacher = transformers.AutoModelForCausalLM.from_pretrained(request["teacher"], dtype=torch.float32)
    return Given(args=args, teacher_model=teacher, **common)


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(request, Timed(), folder).train()


if __name__ == "__main__":
    main()
