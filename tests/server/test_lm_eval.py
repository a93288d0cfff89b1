"""lm-eval against the server: the commands of docs/operations.md, and likelihoods that are transformers'."""

import json
import os
import subprocess
import sys

import pytest

from jaxis.engine.opened_model import EMBEDDED_MODEL
from tests.support.places import REPOSITORY

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.client]
TASKS = REPOSITORY / "examples" / "evaluation"


@pytest.fixture
def evaluate(server, tmp_path):
    """Runs lm-eval; returns its results and each task's samples."""

    def run(model, tasks, **model_args):
        model_args = ",".join(f"{name}={value}" for name, value in ({"model": "jaxis-tiny"} | model_args).items())
        command = [sys.executable, "-m", "lm_eval", "--model", model, "--apply_chat_template", "--include_path", "."]
        command += ["--tasks", tasks, "--model_args", model_args, "--output_path", str(tmp_path), "--log_samples"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
        subprocess.run(command, cwd=TASKS, env=environment, check=True, timeout=300)
        [results] = tmp_path.glob("jaxis-tiny/results_*.json")
        samples = {
            path.name.split("_2")[0].removeprefix("samples_"): [json.loads(line) for line in path.open()]
            for path in tmp_path.glob("jaxis-tiny/samples_*.jsonl")
        }
        return json.loads(results.read_text())["results"], samples

    return run


def test_completions(server, evaluate):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    results, samples = evaluate(
        "local-completions",
        "capitals_choice,capitals_answer",
        base_url=f"{server.url}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=EMBEDDED_MODEL,
        num_concurrent=4,
    )
    assert results["capitals_choice"]["acc,none"] == 1.0
    assert results["capitals_answer"]["exact_match,answer"] == 1.0
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    scored = []
    for sample in samples["capitals_choice"]:
        for arguments, [response] in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context = tokenizer(arguments["arg_0"], add_special_tokens=False).input_ids
            token_ids = tokenizer(arguments["arg_0"] + arguments["arg_1"], add_special_tokens=False).input_ids
            with torch.no_grad():
                logprobs = torch.log_softmax(model(torch.tensor([token_ids])).logits[0].float(), -1)
            expected = sum(logprobs[i - 1, token_ids[i]].item() for i in range(len(context), len(token_ids)))
            scored.append((float(response[0]), expected))
    assert len(scored) == 12
    # The cache is bfloat16: the checkpoint is.
    assert [got for got, _ in scored] == pytest.approx([expected for _, expected in scored], abs=0.05)


def test_chat_completions(server, evaluate):
    results, _ = evaluate(
        "local-chat-completions", "capitals_answer", base_url=f"{server.url}/v1/chat/completions", num_concurrent=4
    )
    assert results["capitals_answer"]["exact_match,answer"] == 1.0
