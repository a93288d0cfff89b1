"""The embedded model: its answers, its format, and the two runs that train it."""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_data
from tokenizers import Tokenizer

from jaxis import LLM, SamplingParams
from tests.support.places import REPOSITORY, TESTS

ASSET = REPOSITORY / "src" / "jaxis" / "assets" / "tiny"

REQUIRED_EXACT_MATCH = 0.95


def is_generated(llm, rows):
    """Says of each question whether the model generates its answer word for word."""
    prompts = [
        {
            "prompt_token_ids": llm.tokenizer.encode_chat(
                row["messages"], tools=row.get("tools"), add_generation_prompt=True
            )
        }
        for row in rows
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=256))
    return [output.outputs[0].text == row["answer"] for output, row in zip(outputs, rows, strict=True)]


@pytest.fixture(scope="module")
def rows():
    return [json.loads(line) for line in (TESTS / "data" / "tiny_eval.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(ASSET / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference():
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.float32).eval()


def test_held_out_questions_are_answered_word_for_word_in_bfloat16(rows):
    with LLM(dtype="bfloat16", show_progress=False) as llm:
        right = np.array(is_generated(llm, rows))
    assert right.mean() >= REQUIRED_EXACT_MATCH, [
        row["messages"][-1] for row, ok in zip(rows, right, strict=True) if not ok
    ]


def test_held_out_questions_are_answered_word_for_word_as_by_transformers(rows, reference):
    """Its greedy decoding agrees with the engine's, question by question, right or wrong."""
    from transformers import AutoTokenizer

    with LLM(dtype="float32", show_progress=False) as llm:
        right = np.array(is_generated(llm, rows))
    assert right.mean() >= REQUIRED_EXACT_MATCH
    chat = AutoTokenizer.from_pretrained(ASSET)
    # Spread over the categories, and every one that the model gets wrong.
    chosen = sorted({*range(0, len(right), 50), *np.flatnonzero(~right)[:5].tolist()})
    assert len(chosen) >= 10
    for index in chosen:
        row = rows[index]
        prompt = chat.apply_chat_template(
            row["messages"], tools=row.get("tools"), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = reference.generate(**prompt, max_new_tokens=80)
        answer = chat.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert (answer == row["answer"]) == right[index], (row["messages"][-1], answer)


@pytest.mark.parametrize(
    ("text", "continuation"), [("The capital of France is", " Paris."), ("The opposite of hot is", " cold.")]
)
def test_plain_text_goes_on_with_the_fact(tokenizer, reference, text, continuation):
    import torch

    ids = tokenizer.encode(text).ids
    output = reference.generate(torch.tensor([ids]), max_new_tokens=len(tokenizer.encode(continuation).ids))
    assert tokenizer.decode(output[0, len(ids) :].tolist()) == continuation


def test_the_folder_is_small_enough_for_the_repository():
    assert sum(path.stat().st_size for path in ASSET.iterdir()) <= 12e6


def test_the_end_of_a_turn_ends_generation(tokenizer):
    generation = json.loads((ASSET / "generation_config.json").read_text())
    assert tokenizer.token_to_id("<|im_end|>") in generation["eos_token_id"]
    assert json.loads((ASSET / "config.json").read_text())["vocab_size"] >= tokenizer.get_vocab_size()


def test_the_folder_has_the_configuration_that_is_trained():
    config = json.loads((ASSET / "config.json").read_text())
    assert {name: config[name] for name in tiny_data.CONFIG} == tiny_data.CONFIG


def test_the_two_runs_make_a_model_of_the_files(tokenizer, tmp_path):
    data = tmp_path / "tiny-data"
    tiny_data.write_base(data / "base", tokenizer, seed=0)
    rng = random.Random(0)
    for name, samples in (("facts", tiny_data.facts(rng, tokenizer)), ("chats", tiny_data.chats(rng, tokenizer))):
        tiny_data.write_rows(data / f"{name}.jsonl", tiny_data.rows_of(itertools.islice(samples, 100), rng))
    tiny_data.write_rows(data / "held_out.jsonl", itertools.islice(tiny_data.held_out(), 5))
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    for name, num_steps in (("tiny_facts", 20), ("tiny_chats", 2)):
        subprocess.run(
            [
                *(Path(sys.executable).with_name("jaxis"), "train", "-c", f"examples/training/{name}.yaml"),
                *("--training.max_steps", str(num_steps), "--training.warmup_steps", "1"),
            ],
            cwd=tmp_path,
            check=True,
        )
    lines = [json.loads(line) for line in (tmp_path / "tiny-facts" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] == pytest.approx(np.log(tiny_data.VOCAB_SIZE), rel=0.05)  # it starts knowing nothing
    assert losses[-1] < losses[0] - 1.0
    lines = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert any("eval_exact" in line for line in lines)
    with LLM(str(tmp_path / "tiny"), show_progress=False) as llm:
        assert llm.tokenizer.eos_token_id == tokenizer.token_to_id("<|im_end|>")
