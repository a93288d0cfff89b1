"""GRPO samples with the weights that it trains, and its loss and advantages are TRL's."""

import dataclasses
import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.setup import build_engine
from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.kernels import native
from jaxis.kernels.sampling import TokenFilters, logsumexp
from jaxis.parallel.mesh import DATA_AXIS
from jaxis.training import answers
from jaxis.training.objectives import GRPO, MISMATCH, VOCAB_MISMATCH, Reported, RolloutBatch
from jaxis.training.rollouts import advantages
from jaxis.training.scores import Draws, Scores
from jaxis.training.sharding import Devices
from jaxis.training.trainer import Trainer
from tests.support import training
from tests.support.drafters import AllDrafts

needs_kernels = pytest.mark.skipif(not native.usable(), reason="needs the native kernels")

REWARDS = """
def begins(prompts, completions, completion_ids, letter, **columns):
    return [float(c[-1]["content"].startswith(each)) + len(ids) / 64 for c, each, ids in
            zip(completions, letter, completion_ids)]
"""
QUESTIONS = ("Who are you?", "Is water wet?", "Can birds fly?")


def grpo_config(tmp_path, output, **settings):
    (tmp_path / "letter_rewards.py").write_text(REWARDS)
    earlier = settings.pop("earlier", [])
    rows = [{"prompt": [*earlier, {"role": "user", "content": each}], "letter": "I"} for each in QUESTIONS]
    grpo = {"num_generations": 4, "max_completion_length": 6, **settings.pop("grpo", {})}
    return training.train_config(
        None,
        training.write_rows(tmp_path / "prompts.jsonl", rows),
        output,
        peft=settings.pop("peft", {"lora_r": 4, "lora_dropout": 0.0}),
        **{
            **{"trainer_type": "TRL_GRPO", "forward_pass": "engine", "reward_functions": ["letter_rewards:begins"]},
            **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "grpo": grpo},
            **settings,
        },
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory whose modules are found."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("letter_rewards", None)


def run(config):
    notes = []
    Trainer(config, notes.append).run(ProgressDisplay(enabled=False))
    return notes


def metrics(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_advantages_are_those_of_the_group():
    rewards = np.random.default_rng(0).random(12)
    groups = rewards.reshape(3, 4)
    expected = [(each - np.mean(group)) / (np.std(group, ddof=1) + 1e-4) for group in groups for each in group]
    np.testing.assert_allclose(advantages(rewards, 4), expected, rtol=1e-12)
    plain = (groups - groups.mean(1, keepdims=True)).ravel()
    np.testing.assert_allclose(advantages(rewards, 4, "none"), plain, rtol=1e-12)
    np.testing.assert_allclose(advantages(rewards, 4, "batch"), plain / (np.std(rewards, ddof=1) + 1e-4), rtol=1e-12)
    assert not advantages(np.ones(4), 4).any()


@pytest.mark.parametrize("corrects", [False, True])
def test_the_derivative_is_that_of_weighted_log_probabilities(corrects):
    """Minus the sum over learned tokens of advantage times log-probability, weighted where it is corrected."""
    rng = np.random.default_rng(0)
    shape = (2, 7)
    logprobs, gains = jnp.asarray(rng.normal(-2, 1, shape)), jnp.asarray(rng.normal(0, 1, shape))
    sampled = logprobs - jnp.asarray(rng.normal(0, 1, shape))
    learned = jnp.asarray(rng.random(shape) < 0.6)
    fields = {field.name: jnp.zeros(1) for field in dataclasses.fields(RolloutBatch)}
    fields |= {
        "vocab_positions": jnp.zeros(0, jnp.int32),
        "vocab_logprobs": jnp.zeros((0, 0)),
        "is_first": jnp.float32(1),
    }
    batch = RolloutBatch(**{**fields, "learned": learned, "sampled_logprobs": sampled, "advantages": gains})

    def loss(logprobs):
        losses = GRPO(corrects, has_filters=False).loss(
            lambda *_: Scores(logprobs, logprobs, None, lambda _: logprobs), {}, {}, batch, jax.random.key(0)
        )
        return losses.total, losses.reported.maxima

    (_, maxima), gradient = jax.value_and_grad(loss, has_aux=True)(logprobs)
    weights = np.minimum(np.exp(np.asarray(logprobs - sampled)), 2.0) if corrects else 1.0
    np.testing.assert_allclose(gradient, np.where(learned, -weights * gains, 0.0), rtol=1e-5, atol=1e-7)
    assert maxima[MISMATCH] == np.abs(np.where(learned, logprobs - sampled, 0.0)).max()


def loss_of_trl(logprobs, before, reference, gains, mask, params):
    """The loss of TRL's GRPOTrainer for one micro-batch, and its reported values; all arguments are [B, L]."""
    log_ratios, sizes = (logprobs - before) * mask, mask.sum(-1).clamp(min=1)
    if params.is_of_answers:
        log_ratios = (log_ratios.sum(-1) / sizes).unsqueeze(-1)
    ratios, (low, high) = log_ratios.exp(), params.clips_at
    losses = -torch.minimum(ratios * gains, ratios.clamp(low, high) * gains)
    divergence = (reference - logprobs).exp() - (reference - logprobs) - 1
    losses = losses + params.beta * divergence
    total = {
        "grpo": ((losses * mask).sum(-1) / sizes).mean(),
        "bnpo": (losses * mask).sum() / mask.sum(),
        "dr_grpo": (losses * mask).sum() / (len(mask) * params.max_completion_length),
        "dapo": (losses * mask).sum(),
    }[params.loss_type]
    clipped = ((ratios < low) & (gains < 0)) | ((ratios > high) & (gains > 0))
    if params.is_of_answers:
        clipped, sizes = clipped.any(-1), torch.ones(len(mask))
    else:
        clipped, sizes = clipped * mask, mask
    sums = (clipped.sum(), (divergence * mask).sum(), sizes.sum(), mask.sum())
    return total, [each.detach().numpy() for each in sums]


@pytest.mark.parametrize("is_of_answers", [False, True], ids=["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo", "dr_grpo"])
def test_losses_of_later_steps_are_those_of_trl(loss_type, is_of_answers):
    rng, shape = np.random.default_rng(0), (2, 3, 7)
    logprobs, gains = rng.normal(-2, 1, shape).astype(np.float32), rng.normal(0, 1, (2, 3, 1)).astype(np.float32)
    before, reference = (logprobs + rng.normal(0, 0.3, shape).astype(np.float32) for _ in range(2))
    learned = rng.random(shape) < 0.6
    gains = np.broadcast_to(gains, shape)
    params = GRPO(
        corrects=True,
        has_filters=False,
        loss_type=loss_type,
        max_completion_length=9,
        has_several_steps=True,
        clips_at=(0.8, 1.28),
        is_of_answers=is_of_answers,
        beta=0.04,
    )
    unused = {field.name: np.zeros(2, np.float32) for field in dataclasses.fields(RolloutBatch)}
    unused |= {"vocab_positions": np.zeros((2, 0), np.int32), "num_sequences": np.ones((2, 3), np.int32)}
    batch = RolloutBatch(
        **{**unused, "ids": learned, "learned": learned, "sampled_logprobs": before, "advantages": gains}
    )

    @jax.value_and_grad
    def loss(logprobs):
        def scores(found):
            return Scores(found, learned, None, lambda _: found)

        total, reported = 0.0, Reported()
        for i in range(2):
            forward = type("Fixed", (), {"fixed": lambda *_, i=i: scores(reference[i])})
            forward.__call__ = lambda *_, i=i: scores(logprobs[i])
            micro_batch = jax.tree.map(lambda array, i=i: array[i], batch)
            losses = params.loss(forward(), {}, {}, micro_batch, jax.random.key(0))
            reported = losses.reported if i == 0 else reported.joined(losses.reported)
            total += losses.total
        weight = params.weight(batch)
        values.append(
            jax.lax.stop_gradient([reported.divided(weight)[name] for name in ("clip_ratio/region_mean", "kl")])
        )
        return total / weight

    values = []
    found, slopes = loss(jnp.asarray(logprobs))
    given = torch.tensor(logprobs, requires_grad=True)
    arrays = [torch.tensor(np.array(each)) for each in (before, reference, gains, learned)]
    totals, sums = zip(*(loss_of_trl(given[i], *(each[i] for each in arrays), params) for i in range(2)), strict=True)
    expected = sum(totals) / (learned.sum() if loss_type == "dapo" else 2)
    expected.backward()
    np.testing.assert_allclose(found, expected.item(), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(slopes, given.grad, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        [float(each) for each in values[0]], np.divide(*np.sum(sums, axis=0).reshape(2, 2)), rtol=1e-5
    )
    if loss_type == "bnpo":  # as the routers' loss is weighed, in a micro-batch
        assert params.weight(jax.tree.map(lambda array: array[0], batch)) == 1


def test_of_all_micro_batches_and_devices_sums_are_divided_and_the_largest_maximum_stays():
    devices = object.__new__(Devices)
    devices.num_devices = 2

    def of_device(values):
        first, second = (Reported({"a": value}, {"b": value}) for value in values)
        return first.joined(second).of_all(devices).divided(jnp.float32(4))

    found = jax.vmap(of_device, axis_name=DATA_AXIS)(jnp.asarray([[1.0, 2.0], [8.0, 5.0]]))
    assert {name: value.tolist() for name, value in found.items()} == {"a": [4.0, 4.0], "b": [8.0, 8.0]}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(131, 1.0, 0.0), (7, 1.0, 0.0), (131, 0.8, 0.0), (131, 1.0, 0.1), (20, 0.9, 0.01)]
)
def test_what_is_trained_is_the_distribution_that_was_drawn_from(top_k, top_p, min_p):
    logits = np.random.default_rng(0).normal(0, 2, (5, 131)).astype(np.float32)
    temperature, wanted = np.float32(0.7), logits.argmax(axis=1)
    filters = TokenFilters(jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p))

    def logprobs(logits):
        drawn = Draws(jnp.float32(temperature), filters).logits(logits)
        return jnp.take_along_axis(drawn, wanted[:, None], axis=1)[:, 0] - logsumexp(drawn)

    expected, slopes = [], []
    for row, token in zip(logits.astype(np.float64) / temperature, wanted, strict=True):
        order = np.argsort(-row)
        kept = np.exp(row - row.max()) * np.isin(np.arange(131), order[:top_k])
        kept *= kept >= min_p
        before = np.concatenate([[0.0], np.cumsum(kept[order])[:-1]])
        kept[order[before >= top_p * kept.sum()]] = 0.0
        kept /= kept.sum()
        expected.append(np.log(kept[token]))
        slopes.append((np.eye(131)[token] - kept) / temperature)
    np.testing.assert_allclose(logprobs(jnp.asarray(logits)), expected, rtol=1e-5, atol=1e-6)
    found = jax.grad(lambda logits: logprobs(logits).sum())(jnp.asarray(logits))
    np.testing.assert_allclose(found, slopes, atol=1e-6)


@pytest.mark.slow
@needs_kernels
@pytest.mark.production_xla
@pytest.mark.parametrize(
    "distribution",
    [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.9}, {"top_k": 5, "min_p": 0.05}],
    ids=lambda distribution: " ".join(distribution) or "as it is",
)
def test_training_sees_what_was_sampled_at_other_temperatures_and_from_fewer_tokens(distribution, here):
    notes, lines = run(grpo_config(here, here / "out", grpo=distribution)), metrics(here / "out")
    assert [(line[MISMATCH], line[VOCAB_MISMATCH]) for line in lines] == [(0.0, 0.0)] * 4
    assert any("0.0 of all sampled tokens, 0.0 of the whole vocabulary at " in note for note in notes)
    assert any(line["grad_norm"] > 0 for line in lines)
    assert all(0 < line["reward"] < 2 for line in lines)


@pytest.mark.slow
@needs_kernels
@pytest.mark.production_xla
def test_training_sees_what_was_guessed_ahead(here, monkeypatch):
    def guessing(*arguments, **keywords):
        built = build_engine(*arguments, **keywords)
        built.engine.speculation.chooser = AllDrafts()  # else measured times of steps decide
        return built

    monkeypatch.setattr(answers, "EngineArgs", partial(EngineArgs, speculative_config={"method": "ngram"}))
    monkeypatch.setattr(answers, "build_engine", guessing)
    answer = "I am Tiny, the small demonstration model of jaxis. I know a few tables and nothing else."
    earlier = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": answer}]
    run(grpo_config(here, here / "out", max_steps=2, earlier=earlier, grpo={"max_completion_length": 24}))
    lines = metrics(here / "out")
    assert [(line[MISMATCH], line[VOCAB_MISMATCH]) for line in lines] == [(0.0, 0.0)] * 2
    assert all(line["drafts_accepted"] > 0.1 for line in lines)


@needs_kernels
@pytest.mark.slow
@pytest.mark.production_xla
@pytest.mark.parametrize("width", [{}, {"mixed_precision_dtype": "bf16"}], ids=["float32", "bfloat16"])
def test_training_all_weights_sees_what_was_sampled(width, here):
    settings = {"peft": None, "learning_rate": 1e-4, **width}
    run(grpo_config(here, here / "whole", **settings))
    assert [(line[MISMATCH], line[VOCAB_MISMATCH]) for line in metrics(here / "whole")] == [(0.0, 0.0)] * 4
    run(grpo_config(here, here / "parts", save_steps=2, **settings))
    resumed = str(here / "parts" / "checkpoint-2")
    run(grpo_config(here, here / "rest", resume_from_checkpoint=resumed, **settings))
    whole, rest = (load_file(here / name / "model.safetensors") for name in ("whole", "rest"))
    assert all(np.array_equal(whole[name], rest[name]) for name in whole)


@needs_kernels
@pytest.mark.slow
@pytest.mark.production_xla
def test_a_run_that_goes_on_ends_as_one_that_never_stopped(here):
    run(grpo_config(here, here / "whole"))
    assert [line[MISMATCH] for line in metrics(here / "whole")] == [0.0] * 4
    run(grpo_config(here, here / "parts", save_steps=2, grpo={"log_completions": True}))
    answers = [json.loads(line) for line in (here / "parts" / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 4 * 8
    groups = [answers[i : i + 4] for i in range(0, len(answers), 4)]
    assert all(len({each["row"] for each in group}) == 1 for group in groups)
    rows = [group[0]["row"] for group in groups]
    assert len(set(rows[:3])) == len(set(rows[3:6])) == 3
    resumed = here / "parts" / "checkpoint-2"
    run(grpo_config(here, here / "rest", resume_from_checkpoint=str(resumed), grpo={"log_completions": True}))
    whole, rest = (load_file(here / name / "adapter_model.safetensors") for name in ("whole", "rest"))
    assert whole.keys() == rest.keys()
    assert all(np.array_equal(whole[name], rest[name]) for name in whole)


@needs_kernels
@pytest.mark.slow
@pytest.mark.production_xla
@pytest.mark.parametrize("peft", [None, {"lora_r": 4, "lora_dropout": 0.0}], ids=["all weights", "adapters"])
def test_several_steps_learn_from_the_same_answers_and_checkpoints_are_between_batches(peft, here):
    grpo = {"num_iterations": 2, "beta": 0.1, "epsilon": 0.01, "loss_type": "grpo"}
    settings = {"peft": peft, "grpo": grpo, "save_steps": 1, "max_steps": 4, "learning_rate": 1e-3, "warmup_steps": 0}
    run(grpo_config(here, here / "whole", forward_pass=None, **settings))
    assert [each.name for each in sorted((here / "whole").glob("checkpoint-*"))] == ["checkpoint-2", "checkpoint-4"]
    lines = metrics(here / "whole")
    assert [line[MISMATCH] for line in lines] == [0.0] * 4
    assert lines[0]["reward"] == lines[1]["reward"] != lines[2]["reward"]
    # Before the first update the model is its own reference.
    assert [line["kl"] > 0 for line in lines] == [False, True, True, True]
    assert [line["clip_ratio/region_mean"] > 0 for line in lines] == [False, True, False, True]
    run(grpo_config(here, here / "rest", resume_from_checkpoint=str(here / "whole" / "checkpoint-2"), **settings))
    name = "adapter_model.safetensors" if peft else "model.safetensors"
    assert (here / "whole" / name).read_bytes() == (here / "rest" / name).read_bytes()


@needs_kernels
@pytest.mark.slow
@pytest.mark.production_xla
def test_the_plain_forward_pass_is_noticed_or_corrected(here):
    wanted = {"forward_pass": "plain", "max_steps": 2}
    with pytest.raises(Exception, match=r"set training\.grpo.on_mismatch to correct or ignore"):
        run(grpo_config(here, here / "error", grpo={"on_mismatch": "error"}, **wanted))
    run(grpo_config(here, here / "correct", **wanted))
    assert all(line[MISMATCH] > 0 and line[VOCAB_MISMATCH] > 0 for line in metrics(here / "correct"))


@needs_kernels
def test_an_adapted_head_decides_the_forward_pass_before_weights_are_read(here, checkpoint):
    peft, reason = {"lora_r": 4, "lora_target_modules": ["q_proj", "lm_head"]}, "requests have no adapters of 'lm_head'"
    for forward_pass in (None, "engine"):
        config = grpo_config(here, here / "out", forward_pass=forward_pass, peft=peft)
        config = dataclasses.replace(config, model={"model_name": str(checkpoint("qwen3"))})
        if forward_pass is None:
            notes = []
            Trainer(config, notes.append)
            assert [
                note for note in notes if reason in note and note.startswith("the forward pass of training is plain")
            ]
        else:
            with pytest.raises(ConfigError, match=f"forward_pass='engine' cannot be honoured: {reason}"):
                Trainer(config, lambda _: None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_functions": []}, "TRL_GRPO needs training.reward_functions"),
        ({"reward_functions": ["letter_rewards:missing"]}, "has no function 'missing'"),
        ({"per_device_train_batch_size": 3}, "a step has 6 answers .* no whole number of groups"),
        ({"grpo": {"temperature": 0}}, "temperature=0 makes all answers of a group alike"),
        ({"grpo": {"top_p": 0}}, "training.grpo.top_p=0 makes all answers of a group alike"),
        ({"grpo": {"top_k": 5}, "forward_pass": "plain"}, "need training.forward_pass=engine"),
        (
            {"grpo": {"num_iterations": 2}, "forward_pass": "plain"},
            "num_iterations above 1 needs training.forward_pass",
        ),
        ({"grpo": {"top_k": 5, "beta": 0.1}}, "beta cannot be honoured with top_p"),
        ({"grpo": {"loss_type": "cispo"}}, "loss_type='cispo' must be one of dapo, bnpo, grpo, dr_grpo"),
        ({"grpo": {"repetition_penalty": 1.1}}, "repetition_penalty"),
        ({"grpo": {"on_mismatch": "shrug"}}, "on_mismatch='shrug' must be one of error, correct, ignore"),
        ({"grpo": {"max_prompt_length": 2}}, "prompts.jsonl, line 1: its prompt of .* leaves no room"),
    ],
)
def test_what_cannot_be_done_is_said(settings, message, here):
    with pytest.raises(ConfigError, match=message):
        Trainer(grpo_config(here, here / "out", **settings), lambda _: None)
