"""Tunix's trainer samples with an engine: its answers, their scores, and its weights are Tunix's own, to rounding."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

from jaxis import LLM, SamplingParams
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.errors import ConfigError

if importlib.util.find_spec("tunix") is None:
    pytest.skip("tunix is not installed", allow_module_level=True)

from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import common
from tunix.rl.rollout.base_rollout import RolloutConfig

from jaxis.integrations.tunix import JaxisRollout

# Tunix 0.1.7 rotates Qwen3 by a theta of 1,000,000, whatever its configuration says.
THETA = 1_000_000
ENGINE = {
    **{"max_num_seqs": 8, "max_model_len": 128, "kv_cache_memory": "16MiB", "dtype": "float32"},
    "hf_overrides": {"rope_theta": THETA},
}
PROMPTS = ["Who are you?", "Is water wet?", "Can birds fly?"]
CONFIG = RolloutConfig(max_tokens_to_generate=6, temperature=1.0, max_prompt_length=16, return_logprobs=True)
GREEDY = dataclasses.replace(CONFIG, temperature=0.0)


def mesh():
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((1, 1), ("fsdp", "tp"), (auto, auto), devices=jax.devices()[:1])


def load_actor():
    read = transformers.AutoConfig.from_pretrained(EMBEDDED_MODEL)
    config = qwen3.ModelConfig(
        num_layers=read.num_hidden_layers,
        vocab_size=read.vocab_size,
        embed_dim=read.hidden_size,
        hidden_dim=read.intermediate_size,
        num_heads=read.num_attention_heads,
        head_dim=read.head_dim,
        num_kv_heads=read.num_key_value_heads,
        rope_theta=THETA,
        norm_eps=read.rms_norm_eps,
        use_tied_embedding=True,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    return qwen3_params.create_model_from_safe_tensors(str(EMBEDDED_MODEL), config, mesh(), dtype=jnp.float32)


@pytest.fixture(scope="module")
def actor():
    return load_actor()


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def rollout(actor, tokenizer):
    rollout = JaxisRollout(actor, tokenizer, **ENGINE)
    yield rollout
    rollout.close()


def scores_of_tunix(rollout, model, output):
    answers = np.full((len(output.tokens), 6), rollout.pad_id(), np.int32)
    for row, tokens in enumerate(output.tokens):
        answers[row, : len(tokens)] = tokens
    prompts = jnp.asarray(output.left_padded_prompt_tokens)
    graph, state = nnx.split(model)
    scored = common.compute_per_token_logps(
        graph, state, prompts, jnp.asarray(answers), rollout.pad_id(), rollout.eos_id(), return_logits=False
    )
    return prompts, jnp.asarray(answers), np.asarray(scored[0] if isinstance(scored, tuple) else scored)


def test_scores_are_those_of_tunix_and_of_the_sampling(rollout, actor):
    output = rollout.generate(PROMPTS, CONFIG)
    prompts, answers, expected = scores_of_tunix(rollout, actor, output)
    again = np.asarray(rollout.get_per_token_logps(prompts, answers))
    for row, (tokens, sampled) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
        assert np.array_equal(again[row, : len(tokens)], sampled)  # bit for bit
        np.testing.assert_allclose(sampled, expected[row, : len(tokens)], atol=2e-4)


def test_weights_follow_the_trainer(rollout, actor):
    before = rollout.generate(PROMPTS, GREEDY)
    with LLM(show_progress=False, **ENGINE) as llm:
        ids = [
            [token for token in row if token != rollout.pad_id()] for row in before.left_padded_prompt_tokens.tolist()
        ]
        plain = llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=6))
    assert [tokens.tolist() for tokens in before.tokens] == [each.outputs[0].token_ids for each in plain]
    state = nnx.state(actor, nnx.Param)

    def changed_by_noise(x):  # to a value that the checkpoint's type has
        noisy = x * (1 + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape))
        return noisy.astype(jnp.bfloat16).astype(jnp.float32)

    noise = jax.tree.map(changed_by_noise, state)
    rollout.update_params(noise, (nnx.Param,))
    changed = rollout.generate(PROMPTS, GREEDY)
    model = nnx.merge(nnx.graphdef(actor), noise, nnx.state(actor, nnx.Not(nnx.Param)))
    _, _, expected = scores_of_tunix(rollout, model, changed)
    for row, sampled in enumerate(changed.logprobs):
        np.testing.assert_allclose(sampled, expected[row, : len(sampled)], atol=2e-4)
    assert any(not np.array_equal(a, b) for a, b in zip(before.tokens, changed.tokens, strict=True))
    rollout.update_params(state)
    back = rollout.generate(PROMPTS, GREEDY)
    assert all(np.array_equal(a, b) for a, b in zip(before.logprobs, back.logprobs, strict=True))
    with pytest.raises(ConfigError, match="not LoRA's"):
        rollout.update_params({}, (nnx.LoRAParam,))


def test_grpo_trains(tokenizer):
    import optax
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner

    actor, reference = load_actor(), load_actor()
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-3),
        eval_every_n_steps=100,
        max_steps=2,
        mini_batch_size=1,
        train_micro_batch_size=1,
    )
    cluster = rl_cluster.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(
                (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh()
            ),
            rollout_engine=functools.partial(JaxisRollout, **ENGINE),
            rollout_config=CONFIG,
            training_config=training,
            offload_to_cpu=False,
        ),
    )
    seen = []

    def reward(prompts, completions, **_):
        seen.append(prompts)
        return [float(len(set(each))) for each in completions]

    before = cluster.rollout.generate(PROMPTS, GREEDY)
    learner = GRPOLearner(
        cluster, reward_fns=reward, algo_config=GRPOConfig(num_generations=4, num_iterations=1, beta=0.0)
    )
    learner.train([{"prompts": np.array([prompt])} for prompt in PROMPTS])
    after = cluster.rollout.generate(PROMPTS, GREEDY)
    assert len(seen) >= 2
    assert any(not np.array_equal(a, b) for a, b in zip(before.logprobs, after.logprobs, strict=True))
    output = cluster.rollout.generate(PROMPTS, CONFIG)
    _, _, expected = scores_of_tunix(cluster.rollout, cluster.actor_trainer.model, output)
    worst = max(np.abs(s - expected[row, : len(s)]).max() for row, s in enumerate(output.logprobs))
    print(f"largest difference between Tunix's trainer and the engine after training: {worst:.3g}")
    assert worst < 0.05  # the checkpoint's type is bfloat16
