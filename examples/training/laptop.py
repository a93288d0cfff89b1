"""Post-training on a laptop: a GGUF file learns a task in three stages, becomes a GGUF file again, and is served.

    python examples/training/laptop.py gemma-3-270m-q4_k_m.gguf --chat-template gemma

The task is to describe boats. Adapters learn it from a few answers; then the model learns from itself, as it answers
when it reads the right answer (distillation); then from rewards of its own answers. Each stage is one `jaxis train`,
whose configuration is in the folder, and begins with the model that the stage before it made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from boats import draw_boats, right, write

JAXIS = str(Path(sys.executable).with_name("jaxis"))
SCORES = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
HINT = "{prompt}\n\nFor example: {privileged_context}"
ANSWER_TOKENS = 24
SHARED = {
    "use_peft": True,
    "per_device_train_batch_size": 16,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "save_steps": 0,
    "logging_steps": 1000,
    "eval_strategy": "steps",
    "eval_steps": 1000,
    "metrics_function": "boats:right",
    "trainer_kwargs": {"max_completion_length": ANSWER_TOKENS},
}
STAGES: dict[str, dict[str, Any]] = {
    "adapter": {},
    "distillation": {
        "trainer_type": "TRL_DISTILLATION",
        "distillation": {"max_completion_length": ANSWER_TOKENS, "teacher_prompt_template": HINT},
    },
    "grpo": {
        "trainer_type": "TRL_GRPO",
        "reward_functions": ["boats:right"],
        **{"eval_strategy": "no", "metrics_function": None},
        "grpo": {"num_generations": 8, "max_completion_length": ANSWER_TOKENS, "beta": 0.01},
    },
}


def configure(stage: str, model: Path, folder: Path, options: argparse.Namespace) -> Path:
    """Writes the configuration of a stage."""
    files = {"train": f"{stage}.jsonl", "validation": "held_out.jsonl"}
    config = {
        "model": {"model_name": str(model), "chat_template": options.chat_template},
        "data": {key: {"datasets": [{"dataset_path": str(folder / name)}]} for key, name in files.items()},
        "training": {
            **SHARED,
            **STAGES[stage],
            # Later stages change little of a model that already answers.
            "learning_rate": options.learning_rate * (1 if stage == "adapter" else 0.1),
            **{"max_steps": options.steps, "output_dir": str(folder / stage)},
        },
        "peft": {"lora_r": 16, "lora_alpha": 32, "peft_save_mode": "merged"},
    }
    path = folder / f"{stage}.yaml"
    path.write_text(json.dumps(config, indent=2))  # JSON is YAML
    return path


def report(stage: str, folder: Path) -> None:
    """Prints a row of the table: what a stage measured. The loss of a distillation is its divergence."""
    lines = [json.loads(line) for line in (folder / stage / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    rate = statistics.median(line["tokens_per_second"] for line in steps[1:])
    peak = max(line["peak_memory_bytes"] for line in steps)
    names = ("loss", "kl", "reward") if stage == "grpo" else ("loss",)
    ends = ", ".join(f"{name} {steps[0][name]:.4f} to {steps[-1][name]:.4f}" for name in names)
    share = "" if stage == "grpo" else f"{lines[-1]['eval_right']:.0%} right"
    print(f"| {stage} | {rate:.0f} tokens/s | {peak / 2**20:.0f} MiB | {ends} | {share} |", flush=True)


def ask(port: int, prompt: str) -> str:
    """Returns the answer of the server to a user."""
    body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": ANSWER_TOKENS}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]


def serve(model: Path, held_out: Path, options: argparse.Namespace) -> None:
    """Serves a GGUF file, and asks it about the held-out boats."""
    command = [JAXIS, "serve", str(model), "--port", str(options.port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{options.port}/health")
                break
            except OSError:
                time.sleep(0.2)
        rows = [json.loads(line) for line in held_out.read_text().splitlines()]
        answers = [ask(options.port, row["prompt"][0]["content"]) for row in rows]
        scores = right([[{"content": answer}] for answer in answers], [row["right"] for row in rows])
        print(f"served: {sum(scores):.0f} of {len(rows)} right, such as {answers[0]!r}")
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--chat-template", help="of a model that has none: gemma, or another name or file")
    parser.add_argument("--folder", type=Path, default=Path("laptop"), help="is made")
    parser.add_argument("--steps", type=int, default=20, help="of each stage")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the first stage; of later ones a tenth")
    parser.add_argument("--port", type=int, default=8017)
    options = parser.parse_args()
    folder = options.folder
    folder.mkdir()
    boats = draw_boats(288, seed=0)
    held_out = write(folder / "held_out.jsonl", boats[:32], hints=True)
    write(folder / "adapter.jsonl", boats[32:64])
    for stage in ("distillation", "grpo"):
        write(folder / f"{stage}.jsonl", boats[64:], hints=stage == "distillation")
    subprocess.run([JAXIS, "convert", str(options.model), str(folder / "base"), "--to", "hf"], check=True)
    model = folder / "base"
    for stage in STAGES:
        subprocess.run([JAXIS, "train", "-c", str(configure(stage, model, folder, options))], env=SCORES, check=True)
        report(stage, folder)
        model = folder / stage
    finished = folder / "finished.gguf"
    subprocess.run([JAXIS, "convert", str(model), str(finished), "--to", "gguf", "--outtype", "q8_0"], check=True)
    serve(finished, held_out, options)


if __name__ == "__main__":
    main()
