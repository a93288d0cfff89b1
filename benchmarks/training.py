"""Training beside TRL and PEFT on torch: losses, tokens per second and peak memory.

    python -m venv PEERS && PEERS/bin/pip install 'torch==2.13.0' 'transformers>=5,<6' 'peft>=0.21' 'trl>=1.16'

    python benchmarks/random_checkpoint.py FOLDER
    python benchmarks/training.py FOLDER --peers PEERS/bin/python --method adapters
    python benchmarks/training.py FOLDER --peers PEERS/bin/python --method distillation --teacher TEACHER

    python examples/training/laptop.py MODEL.gguf
    python benchmarks/training.py --peers PEERS/bin/python --config laptop/adapter.yaml

By a method, both train the same layers at the same rank on the same rows, all of whose tokens are learned, in a process
each; by a configuration of `jaxis train`, what it says. The first step, in which programs are compiled, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from jaxis.training.examples import Example

HERE = Path(__file__).parent
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_rows(path: Path, options: argparse.Namespace) -> None:
    """Writes texts that are longer than the rows that are cut from them."""
    drawn = random.Random(0)
    words = ["".join(drawn.choices(string.ascii_lowercase, k=5)) for _ in range(options.tokens * options.rows)]
    texts = [" ".join(words[i :: options.rows]) for i in range(options.rows)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def with_tokenizer(checkpoint: Path, folder: Path) -> Path:
    """Returns a checkpoint that has a tokenizer: the given one, or its files beside the embedded model's tokenizer."""
    if (checkpoint / "tokenizer.json").exists():
        return checkpoint
    from jaxis.engine.opened_model import EMBEDDED_MODEL

    made = Path(tempfile.mkdtemp(dir=folder))
    for file in checkpoint.iterdir():
        (made / file.name).symlink_to(file.resolve())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, made)
    return made


def configuration(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Makes the configuration of a method."""
    write_rows(folder / "rows.jsonl", options)
    training: dict[str, Any] = {"trainer_type": "TRL_SFT"}
    if options.method == "distillation":
        teacher = with_tokenizer(options.teacher, folder)
        distillation = {"teacher_model_name_or_path": str(teacher), "lmbda": 0, "beta": options.beta}
        training = {"trainer_type": "TRL_DISTILLATION", "distillation": distillation}
    return {
        "model": {"model_name": str(with_tokenizer(options.checkpoint, folder)), "model_max_length": options.tokens},
        "data": {"train": {"datasets": [{"dataset_path": str(folder / "rows.jsonl")}]}},
        "training": {
            **training,
            "use_peft": True,
            "per_device_train_batch_size": options.rows,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "max_steps": options.steps + 1,
            "save_steps": 0,
            "enable_gradient_checkpointing": options.recompute,
            "forward_pass": options.forward_pass,
        },
        "peft": {"lora_r": 8, "lora_alpha": 16, "lora_target_modules": LAYERS},
    }


def prepared(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the configuration without evaluation, and with a folder of its own."""
    training = {**config["training"], "output_dir": str(folder / "run"), "eval_strategy": "no", "logging_steps": 1000}
    training.pop("metrics_function", None)
    return {**config, "training": training}


def jaxis_steps(config: dict[str, Any]) -> None:
    """Trains by jaxis; metrics.jsonl has its steps."""
    from jaxis.host.progress import ProgressDisplay
    from jaxis.training.config import TrainConfig
    from jaxis.training.trainer import Trainer

    config = {**config, "training": {**config["training"], "save_final_model": False}}
    Trainer(TrainConfig.of(config), lambda _: None).run(ProgressDisplay(enabled=False))


def prompt_and_answer(example: Example) -> tuple[list[int], list[int]]:
    """Returns the token ids of an example up to its first learned one, and up to its last."""
    ids, learned = example.ids.tolist(), [place for place, is_learned in enumerate(example.learned) if is_learned]
    return ids[: learned[0]], ids[learned[0] : learned[-1] + 1]


def trl_request(config: dict[str, Any]) -> dict[str, Any]:
    """Returns what TRL is asked for: the settings, and the rows as token ids or prompts."""
    import dataclasses

    from jaxis.training.config import TrainConfig
    from jaxis.training.data import GivenBatches
    from jaxis.training.trainer import Trainer

    parsed = TrainConfig.of(config)
    trainer = Trainer(parsed, lambda _: None)
    kind, given = parsed.training.trainer_type, parsed.training.distillation
    request = {
        "model": str(trainer.base.path),
        "teacher": given.teacher_model_name_or_path or str(trainer.base.path),
        "teacher_prompt_template": given.teacher_prompt_template,
        "chat_template": trainer.base.tokenizer.default_chat_template,
        "training": dataclasses.asdict(parsed.training),
        "lora": {
            **{"r": parsed.peft.lora_r, "lora_alpha": parsed.peft.lora_alpha},
            "target_modules": list(parsed.peft.lora_target_modules or LAYERS),
        },
    }
    order: list[int] = []
    if isinstance(trainer.data, GivenBatches):
        steps = map(trainer.data.split.batches.rows, range(parsed.training.max_steps))
        order = [place for step in steps for [place] in step]
    examples = [trainer.data.examples[place] for place in order]
    if kind == "TRL_SFT":
        labels = [
            [int(i) if is_learned else -100 for i, is_learned in zip(e.ids, e.learned, strict=True)] for e in examples
        ]
        rows = [{"input_ids": e.ids.tolist(), "labels": each} for e, each in zip(examples, labels, strict=True)]
    elif kind == "TRL_DISTILLATION" and not given.lmbda:
        request["training"]["distillation"]["max_completion_length"] = max(len(each.ids) for each in examples)
        rows = [{"prompt": json.dumps(prompt_and_answer(each))} for each in examples]
    else:
        path = Path(config["data"]["train"]["datasets"][0]["dataset_path"])
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [{name: value for name, value in row.items() if name != "completion"} for row in rows]
        rows = [rows[place] for place in order] or rows
    return {**request, "rows": rows}


def measured(name: str, config: dict[str, Any], folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs a system in a process of its own; returns what it measured in each step."""
    path = folder / f"{name}.json"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *options.paths])}
    if name == "jaxis":
        path.write_text(json.dumps(config))
        subprocess.run([sys.executable, __file__, "--run", str(path)], env=environment, check=True)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [step for line in lines if "tokens_per_second" in (step := json.loads(line))]
    path.write_text(json.dumps(trl_request(config)))
    command = [options.peers, "-m", "peers.trl_peer", str(path)]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    steps = [json.loads(line) for line in output.splitlines() if line.startswith('{"loss"')]
    return [{**step, "tokens_per_second": step["tokens"] / step["seconds"]} for step in steps]


def show(name: str, steps: Sequence[dict[str, Any]]) -> None:
    """Prints a row of the table."""
    rates = [step["tokens_per_second"] for step in steps[1:]]
    rate = f"{statistics.median(rates):.1f} tokens/s, at best {max(rates):.1f}"
    peak = max(step["peak_memory_bytes"] for step in steps) / 2**30
    ends = [f"{key} {steps[0][key]:.6g} to {steps[-1][key]:.6g}" for key in ("loss", "kl", "reward") if key in steps[0]]
    print(f"| {name} | {rate} | {peak:.2f} GiB | {', '.join(ends)} |", flush=True)


def main() -> None:
    """Measures each system in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--config", type=Path, help="Of `jaxis train`, in place of a method.")
    parser.add_argument("--paths", nargs="*", default=[], help="Folders with the modules that it names.")
    parser.add_argument("--method", default="adapters", choices=("adapters", "distillation"))
    parser.add_argument("--teacher", type=Path, help="Of a distillation.")
    parser.add_argument("--beta", type=float, default=0.5, help="Of a distillation.")
    parser.add_argument("--peers", default=sys.executable, help="Python of the environment with torch, PEFT and TRL.")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--recompute", action="store_true", help="Compute layers again for their derivatives.")
    parser.add_argument("--forward-pass", default="plain", choices=("plain", "engine"), help="Of jaxis.")
    parser.add_argument("--systems", default="jaxis,trl")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        jaxis_steps(json.loads(options.run.read_text()))
        return
    sys.path += options.paths
    for name in options.systems.split(","):
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            config = yaml.safe_load(options.config.read_text()) if options.config else configuration(folder, options)
            show(name, measured(name, prepared(config, folder), folder, options))


if __name__ == "__main__":
    main()
