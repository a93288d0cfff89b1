"""What it costs to have several models at one address: a first load, and a switch between two that are loaded.

python benchmarks/several_models.py CHECKPOINT [--rounds N]

Prompts are token ids, so the checkpoint needs no tokenizer. A start alone is from the start of `jaxis serve CHECKPOINT`
to its first answer, of one token; a cold load is from a request to a running server of several models to its answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

SERVE = [
    sys.executable,
    "-c",
    "from jaxis.cli.main import main; main()",
    "serve",
    "--port",
    "0",
    "--max-model-len",
    "2048",
]


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[httpx.Client]:
    """A client of a server that was started with some arguments."""
    process = subprocess.Popen([*SERVE, *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("url:"):
                break
        else:
            sys.exit("".join(lines))
        with tempfile.TemporaryFile("w") as rest:
            subprocess.Popen(["cat"], stdin=process.stderr, stdout=rest)  # so that the pipe never fills
            with httpx.Client(base_url=line.split()[1].removesuffix("/v1"), timeout=300) as http:
                yield http
    finally:
        process.terminate()
        process.wait()


def ask(http: httpx.Client, model: str | None) -> float:
    """Seconds of an answer of one token to 16."""
    body = {"prompt": list(range(100, 116)), "max_tokens": 1, "temperature": 0}
    start = time.monotonic()
    answer = http.post("/v1/completions", json=body | ({} if model is None else {"model": model}))
    answer.raise_for_status()
    return time.monotonic() - start


def main() -> None:
    """Measures, and prints one JSON object of seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    alone, cold = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.yaml"
        models = [{"name": name, "model": str(options.checkpoint.resolve())} for name in "ab"]
        file.write_text(json.dumps({"models": models}))
        with serving("--models", str(file)) as http:
            ask(http, "a")  # programs are compiled, and files are in memory
            for _ in range(options.rounds):
                http.post("/models/unload", json={"model": "a"}).raise_for_status()
                cold.append(ask(http, "a"))
                start = time.monotonic()
                with serving(str(options.checkpoint)) as other:
                    ask(other, None)
                    alone.append(time.monotonic() - start)
            ask(http, "b")
            same = [ask(http, "a") for _ in range(40)]
            switched = [ask(http, "ab"[number % 2]) for number in range(80)]
        with serving(str(options.checkpoint)) as http:
            ask(http, None)
            single = [ask(http, None) for _ in range(40)]
    median = statistics.median
    print(
        json.dumps(
            {
                "start_alone": [round(seconds, 2) for seconds in alone],
                "cold_load": [round(seconds, 2) for seconds in cold],
                "cold_load_minus_start_alone": round(median(cold) - median(alone), 2),
                "answer_of_a_server_of_one_model": round(median(single), 4),
                "answer_of_the_same_model_again": round(median(same[10:]), 4),
                "answer_after_a_switch": round(median(switched[10:]), 4),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
