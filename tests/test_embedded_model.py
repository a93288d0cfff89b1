"""The embedded model: its answers, its format, and the script that trains it."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import train_tiny
from tiny.batches import batches
from tokenizers import Tokenizer

from tests.support.places import REPOSITORY

ASSET = REPOSITORY / "src" / "jaxis" / "assets" / "tiny"

REQUIRED_EXACT_MATCH = 0.95


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(ASSET / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference():
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.float32).eval()


@pytest.mark.slow
def test_held_out_questions_are_answered_word_for_word_in_bfloat16(tokenizer):
    evaluation = train_tiny.Evaluation(tokenizer, train_tiny.EVALUATION)
    right = train_tiny.evaluate_export(ASSET, evaluation, jnp.bfloat16)
    assert right.mean() >= REQUIRED_EXACT_MATCH, evaluation.by_category(right)


@pytest.mark.slow
def test_held_out_questions_are_answered_word_for_word_as_by_transformers(tokenizer, reference):
    """Its greedy decoding agrees with the one-pass evaluation, question by question, right or wrong."""
    from transformers import AutoTokenizer

    evaluation = train_tiny.Evaluation(tokenizer, train_tiny.EVALUATION)
    right = train_tiny.evaluate_export(ASSET, evaluation, jnp.float32)
    assert right.mean() >= REQUIRED_EXACT_MATCH, evaluation.by_category(right)
    chat = AutoTokenizer.from_pretrained(ASSET)
    # Spread over the categories, and every one that the model gets wrong.
    chosen = sorted({*range(0, len(right), 50), *np.flatnonzero(~right)[:5].tolist()})
    assert len(chosen) >= 10
    for index in chosen:
        row = evaluation.rows[index]
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


@pytest.fixture(scope="module")
def training(tokenizer):
    """A fresh model's weights, its optimizer, the compiled train step and a batch; the step may consume its inputs."""
    weights, logits_of = train_tiny.build_model(seed=0)
    optimizer = train_tiny.make_optimizer(4e-3, steps=1000)
    batch = next(batches(tokenizer, 0, tokens_per_batch=512))
    return (
        {n: np.asarray(w) for n, w in weights.items()},
        optimizer,
        train_tiny.make_train_step(logits_of, optimizer),
        batch,
    )


def start(training):
    weights, optimizer, *_ = training
    weights = {name: jnp.array(weight) for name, weight in weights.items()}
    return weights, optimizer.init(weights)


@pytest.mark.slow
def test_training_lowers_the_loss_on_what_it_sees_and_resumes_where_it_stopped(training, tmp_path):
    *_, train_step, batch = training
    weights, state = start(training)
    losses = []
    for _ in range(12):
        weights, state, loss = train_step(weights, state, batch.ids, batch.weights)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(np.log(train_tiny.VOCAB_SIZE), rel=0.05)  # it starts knowing nothing
    assert losses[-1] < losses[0] - 1.0

    path = tmp_path / "checkpoint.npz"
    train_tiny.save_checkpoint(path, 12, weights, state)
    step, restored, restored_state = train_tiny.load_checkpoint(path, weights, state)
    assert step == 12
    *_, goes_on = train_step(restored, restored_state, batch.ids, batch.weights)
    *_, without_stop = train_step(weights, state, batch.ids, batch.weights)
    assert float(goes_on) == float(without_stop)


@pytest.mark.slow
def test_tokens_after_the_weighted_ones_do_not_change_the_loss(training):
    *_, train_step, batch = training
    seen = np.arange(batch.ids.shape[1]) < 40
    token_weights = np.where(seen, batch.weights, 0.0).astype(np.float32)
    changed_ids = np.where(seen, batch.ids, 7).astype(np.int32)
    losses = [float(train_step(*start(training), ids, token_weights)[2]) for ids in (batch.ids, changed_ids)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
