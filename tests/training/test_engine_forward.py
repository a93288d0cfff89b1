"""Training differentiates, bit for bit, what the engine returned when it sampled; its derivatives are right."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis import LLM, LoRARequest, SamplingParams
from jaxis.config.hf_config import HFConfig
from jaxis.engine.execution.program_context import jit
from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.kernels import native
from jaxis.kernels.weights import as_weight
from jaxis.training.base_model import BaseModel
from jaxis.training.batches import Batches, BatchShape
from jaxis.training.examples import Example
from jaxis.training.trainable import make_trainable
from tests.support import parity, training
from tests.support.parity import FAMILIES

pytestmark = [
    pytest.mark.production_xla,
    pytest.mark.skipif(not native.usable(), reason="needs the native kernels"),
]

NUM_TOKENS = 12
PROMPTS = [parity.prompt(length) for length in (3, 20, 37)]
WIDTHS = [("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int4")]
# What the engine's forward pass cannot train, and says so.
REFUSED = "have no derivatives"


def trainable_of(family, tmp_path, dtype, quantization, forward_pass="engine", *, adapts=True):
    folder = Path(parity.checkpoint_folder(family))
    rows = training.write_rows(tmp_path / "rows.jsonl", [])
    peft = {"lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0} if adapts else None
    config = training.train_config(folder, rows, tmp_path / "out", peft=peft, forward_pass=forward_pass)
    base = BaseModel(folder, family.name, HFConfig.from_folder(folder), None, {}, 128, jnp.dtype(dtype), quantization)
    return folder, make_trainable(config, base, ProgressDisplay(enabled=False))


def drawn(trainable, folder):
    """The trained arrays after changes that are drawn; the folder gets it, too."""
    rng = np.random.default_rng(0)
    trained = {
        name: value if "lora_A" in name else value + jnp.asarray(rng.normal(0, 0.05, value.shape), jnp.float32)
        for name, value in trainable.initial.items()
    }
    folder.mkdir()
    trainable.write(folder, {name: np.asarray(value) for name, value in trained.items()})
    trainable.refresh_frozen(trained)
    return trained


def sampled(folder, adapter, dtype, quantization):
    """Examples of prompts with the answers that the engine sampled, and the log-probability of each of their tokens."""
    options = {"dtype": dtype, "quantization": quantization, "max_model_len": 128, "kv_cache_memory": "4MiB"}
    if adapter is not None:
        options |= {"enable_lora": True, "max_lora_rank": 8}
    with LLM(folder, show_progress=False, **options) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in PROMPTS],
            SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=3, logprobs=0, ignore_eos=True),
            lora_request=None if adapter is None else LoRARequest("a", 1, str(adapter)),
        )
    examples, logprobs = [], []
    for ids, output in zip(PROMPTS, outputs, strict=True):
        [answer] = output.outputs
        learned = np.arange(len(ids) + NUM_TOKENS) >= len(ids)
        examples.append((Example(np.asarray([*ids, *answer.token_ids], np.int32), learned, ""),))
        logprobs.append([entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)])
    return examples, np.asarray(logprobs, np.float32)


def log_probabilities(trainable, trained, batch):
    """Log-probabilities of learned tokens, and the derivatives of minus their sum, over all micro-batches."""
    forward = trainable.forward(is_training=True)

    def loss(trained, micro_batch):
        logprobs = forward(trainable.combine(trained, trainable.frozen), micro_batch, jax.random.key(0)).logprobs
        return -logprobs.sum(), logprobs

    differentiate = jit(jax.value_and_grad(loss, has_aux=True))
    found, total = [], None
    for number in range(len(batch.ids)):
        micro_batch = jax.tree.map(lambda array, n=number: jnp.asarray(array[n]), batch)
        (_, logprobs), gradient = differentiate(trained, micro_batch)
        found.append(np.asarray(logprobs)[np.asarray(micro_batch.learned)])
        total = gradient if total is None else jax.tree.map(jnp.add, total, gradient)
    return np.concatenate(found), total


def check_family(family, tmp_path, dtype, quantization, shapes, *, adapts=True):
    folder, trainable = trainable_of(family, tmp_path, dtype, quantization, adapts=adapts)
    written = tmp_path / "written"
    trained = drawn(trainable, written)
    examples, expected = sampled(*((folder, written) if adapts else (written, None)), dtype, quantization)
    for shape, packs in shapes:
        batch = Batches(examples, shape, seed=None, packs=packs).batch(0)
        found, gradient = log_probabilities(trainable, trained, batch)
        # Packing has another order.
        np.testing.assert_array_equal(np.sort(found), np.sort(expected.reshape(-1)))
        assert all(np.isfinite(each).all() for each in gradient.values())
    return trainable, trained, batch, gradient


ROWS = (BatchShape(2, 2, 64), False)
PACKED = (BatchShape(1, 2, 64), True)  # in both rows
DENSE = next(family for family in FAMILIES if family.name == "Qwen3, tied")


@pytest.mark.slow
@pytest.mark.parametrize("adapts", [True, False], ids=["adapters", "all weights"])
@pytest.mark.parametrize(("dtype", "quantization"), WIDTHS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family(family, dtype, quantization, adapts, tmp_path):
    try:
        check_family(family, tmp_path, dtype, quantization, [ROWS, PACKED], adapts=adapts)
    except ConfigError as error:
        if REFUSED not in str(error) and "cannot be trained" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.sampled
@pytest.mark.parametrize("adapts", [True, False], ids=["adapters", "all weights"])
def test_what_was_sampled_is_differentiated_and_the_derivatives_are_those_of_the_plain_forward_pass(adapts, tmp_path):
    """test_against_torch.py compares them with PyTorch's."""
    _, _, batch, gradient = check_family(DENSE, tmp_path, "float32", None, [PACKED], adapts=adapts)
    plain = trainable_of(DENSE, tmp_path, "float32", None, "plain", adapts=adapts)[1]
    _, expected = log_probabilities(plain, drawn(plain, tmp_path / "same"), batch)
    for name, each in expected.items():
        np.testing.assert_allclose(gradient[name], each, atol=1e-5 * np.abs(each).max(), rtol=0)


@pytest.mark.slow
def test_derivatives_beside_int8_weights_point_where_those_beside_the_same_floats_do(tmp_path):
    _, trainable = trainable_of(DENSE, tmp_path, "float32", "int8", "plain")
    trained = drawn(trainable, tmp_path / "adapter")
    examples = [(Example(np.asarray(ids, np.int32), np.arange(len(ids)) > 0, ""),) for ids in PROMPTS]
    batch = Batches(examples, BatchShape(2, 2, 64), seed=None).batch(0)
    _, found = log_probabilities(trainable, trained, batch)
    trainable.frozen = {
        name: value if isinstance(value, jax.Array) else as_weight(value).dequantize()
        for name, value in trainable.frozen.items()
    }
    _, expected = log_probabilities(trainable, trained, batch)
    difference = np.sqrt(sum(np.square(found[name] - each).sum() for name, each in expected.items()))
    assert difference < 0.05 * np.sqrt(sum(np.square(each).sum() for each in expected.values()))


def test_families_without_derivatives_are_refused(tmp_path):
    selecting = next(family for family in FAMILIES if family.name == "DeepSeek V3.2")
    with pytest.raises(ConfigError, match=REFUSED):
        trainable_of(selecting, tmp_path, "float32", None)


PAIR = {"prompt": "Who are you?", "chosen": "I am jaxis.", "rejected": "Nobody."}


@pytest.mark.slow
@pytest.mark.parametrize("trainer_type", ["TRL_SFT", "TRL_DPO"])
def test_all_weights_learn_as_on_the_plain_pass(trainer_type, tmp_path):
    rows = [PAIR, PAIR] if trainer_type == "TRL_DPO" else [training.dialogue("Who are you?", "I am jaxis.")] * 2
    path, losses = training.write_rows(tmp_path / "rows.jsonl", rows), {}
    for forward_pass in ("engine", "plain"):
        output = tmp_path / forward_pass
        options = {"trainer_type": trainer_type, "forward_pass": forward_pass, "learning_rate": 1e-4}
        training.run(training.train_config(None, path, output, **options))
        losses[forward_pass] = [line["loss"] for line in training.metrics(output)]
    assert losses["plain"][-1] < losses["plain"][0]
    np.testing.assert_allclose(losses["engine"], losses["plain"], rtol=1e-4)
