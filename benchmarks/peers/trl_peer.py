"""TRL and PEFT: the trainers whose keys jaxis reads, on the token ids that jaxis made of the data rows.

    python -m peers.trl_peer REQUEST.json

Prints a JSON object for each step: loss, seconds and tokens, and the peak of memory so far.
"""

from __future__ import annotations

import importlib
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
from trl.experimental.sdft import SDFTConfig, SDFTTrainer

SETTINGS = (
    *("max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm"),
    "per_device_train_batch_size",
)


class Timed(transformers.TrainerCallback):
    """Prints each step; `tokens` counts those that a trainer computed in it."""

    def __init__(self) -> None:
        self.tokens, self._start = 0, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.tokens, self._start = 0, time.perf_counter()

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            values = {name: logs[name] for name in ("loss", "kl", "reward") if name in logs}
            measured = {"seconds": time.perf_counter() - self._start, "tokens": self.tokens}
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({**values, **measured, "peak_memory_bytes": peak}), flush=True)


def shared(request: dict[str, Any], folder: str) -> dict[str, Any]:
    """Arguments that all of TRL's configurations have."""
    training = request["training"]
    return {
        **{name: training[name] or 0 for name in SETTINGS},
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
    tokenizer.chat_template = request["chat_template"]
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
            **arguments,
            max_length=None,
            loss_type="nll",
            dataset_kwargs={"skip_prepare_dataset": True},
            train_sampling_strategy="sequential",
        )
        return counting(trl.SFTTrainer, timed)(args=args, **common)
    if kind == "TRL_GRPO":
        module, _, name = training["reward_functions"][0].partition(":")
        names = ("num_generations", "max_completion_length", "beta", "loss_type", "temperature")
        args = trl.GRPOConfig(**arguments, shuffle_dataset=False, **{name: training["grpo"][name] for name in names})
        rewards = getattr(importlib.import_module(module), name)
        return counting(trl.GRPOTrainer, timed)(args=args, reward_funcs=rewards, **common)
    if "privileged_context" in rows.column_names:
        args = SDFTConfig(
            **arguments,
            shuffle_dataset=False,
            num_generations=1,
            max_completion_length=given["max_completion_length"],
            distillation_alpha=given["beta"],
            distillation_mode="full_logits",
            teacher_prompt_template=request["teacher_prompt_template"],
        )
        return counting(SDFTTrainer, timed)(args=args, **common)

    class Given(counting(trl.DistillationTrainer, timed)):
        """Learns answers that are given: their token ids are in the prompt's place, after its own."""

        def _generate(self, prompts: list[Any]) -> Any:
            given = [json.loads(prompt) for prompt in prompts]
            return [ids for ids, _ in given], [ids for _, ids in given], None, None, None

    args = trl.DistillationConfig(
        **arguments,
        shuffle_dataset=False,
        max_completion_length=given["max_completion_length"],
        beta=given["beta"],
        temperature=given["temperature"],
    )
    teacher = transformers.AutoModelForCausalLM.from_pretrained(request["teacher"], dtype=torch.float32)
    trainer = Given if given["lmbda"] == 0 else counting(trl.DistillationTrainer, timed)
    return trainer(args=args, teacher_model=teacher, **common)


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(request, Timed(), folder).train()


if __name__ == "__main__":
    main()
