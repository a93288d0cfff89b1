"""Losses, gradients and steps are those of transformers, PEFT and PyTorch in float32.

`pytest -s -m "" -k loss_and_gradients tests/training/test_against_torch.py` prints a row of a table for each family.
"""

import shutil
from unittest import mock

import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers

from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.training.base_model import BaseModel, open_base_model
from jaxis.training.batches import Batches, BatchShape
from jaxis.training.config.training import TrainingParams
from jaxis.training.optimizer import make_optimizer
from jaxis.training.trainable import make_trainable
from jaxis.training.trainer import Trainer
from tests.support import parity, training
from tests.support.adapters import base_model
from tests.support.parity import FAMILIES
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import write_tokenizer
from tests.training.gradients import check_gradients, in_float64, largest_error, random_examples, saved_gradients

QUICK = ("Qwen3, tied", "Qwen3 MoE")
# All but one whose config.json has a key that nothing reads, which loading refuses, and those that are not trained.
WITH_TABLE = ("Qwen3.8-Flash-Next", "DeepSeek V4.1", "LongCat-Flash-Lite", "LongCat 2.0")
FAMILY_ROWS = [family for family in FAMILIES if family.name not in ("EXAONE 4, no windows", *WITH_TABLE)]
ROWS = [
    training.dialogue("Where is the cat?", "On the mat.", "And now?", "Under it, I think."),
    training.dialogue("Count.", "One, two, three."),
    training.dialogue("Say hello.", "Hello!"),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return training.write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


@pytest.mark.parametrize(("name", "use_peft"), [(WITH_TABLE[0], True), *((name, False) for name in WITH_TABLE)])
def test_a_model_with_a_table_in_files_is_refused(name, use_peft, rows, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(parity.checkpoint_folder(next(f for f in FAMILIES if f.name == name)), folder)
    write_tokenizer(folder)
    config = training.train_config(folder, rows, tmp_path / "out", use_peft=use_peft)
    with (
        mock.patch.object(BaseModel, "load", side_effect=AssertionError("loaded")),
        pytest.raises(ConfigError, match="is not supported: it has a table that stays in the checkpoint's files"),
    ):
        make_trainable(config, open_base_model(config), ProgressDisplay(enabled=False))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "family", quick_rows(FAMILY_ROWS, [f for f in FAMILY_ROWS if f.name in QUICK]), ids=lambda family: family.name
)
def test_loss_and_gradients_of_packed_sequences_are_those_of_torch(family, rows, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(parity.checkpoint_folder(family), folder)
    write_tokenizer(folder)
    config = training.train_config(folder, rows, tmp_path / "out", enable_gradient_checkpointing=True)
    model = make_trainable(config, open_base_model(config), ProgressDisplay(enabled=False))
    examples = random_examples()
    batch = Batches([(each,) for each in examples], BatchShape(1, 1, 48), seed=None, packs=True).batch(0)
    total, gradient, weight = training.gradients(model, batch)

    reference = parity.reference_model(family)
    reference.zero_grad()
    loss = training.torch_loss(reference, examples)
    loss.backward()
    loss_error = abs(total / weight - loss.item()) / loss.item()
    expected = saved_gradients(family, reference, tmp_path / "gradients")
    errors, compared = {}, 0
    tiny = 1e-6 * max(np.abs(each).max() for each in expected.values())

    def found(name):
        mine = model.places.tensor_of(name, gradient)
        if mine is not None and name.endswith("embed_tokens_per_layer.weight"):
            mine = mine.copy()
            mine[0] = 0  # of which torch derives nothing: the padding token's, and of tokens past the table
        return mine

    for name, theirs in expected.items():
        if (mine := found(name)) is None:
            continue
        compared += mine.size
        if np.abs(theirs).max() < tiny:  # zero but for rounding, such as that of a bias that all keys have in common
            assert np.abs(mine).max() < tiny * weight, name
            continue
        errors[name] = largest_error(mine / weight, theirs)
    worst = max(errors, key=errors.__getitem__)
    share = compared / sum(value.size for value in gradient.values())
    print(f"\n| {family.name} | {loss_error:.1e} | {errors[worst]:.1e} | {worst} | {share:.0%} |")
    assert loss_error < 1e-5

    def exact():
        model = in_float64(reference)
        training.torch_loss(model, examples).backward()
        return saved_gradients(family, model, tmp_path / "exact")

    check_gradients(errors, lambda name: found(name) / weight, expected, exact)
    assert share > 0.95


def three_steps(checkpoint, rows, tmp_path, epsilon):
    """The start of three steps of adapters, as a folder, and the run, which has trained."""
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3}
    schedule = {"weight_decay": 0.01, "lr_scheduler_type": "cosine", "warmup_steps": 1, "adam_epsilon": epsilon}
    config = training.train_config(
        checkpoint("qwen3"), rows, tmp_path / "out", peft={"lora_r": 4, "lora_alpha": 8}, **schedule, **batch
    )
    trainer = Trainer(config, lambda _: None)
    start = make_trainable(config, trainer.base, ProgressDisplay(enabled=False))
    first = tmp_path / "first"
    first.mkdir()
    start.write(first, {name: np.asarray(value) for name, value in start.initial.items()})
    training.run(config)
    return first, trainer


def steps_of_peft(base, first, examples, epsilon, dtype):
    """The same steps by PEFT and torch: the losses, and the model."""
    model = peft.PeftModel.from_pretrained(base_model(base), str(first), is_trainable=True).to(dtype)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01, eps=epsilon)
    schedule = transformers.get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = training.torch_loss(model, examples)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, model


def element_errors(found, expected):
    """The errors of all elements of adapters, next to the largest of their tensor."""
    pairs = zip(found.named_parameters(), expected.named_parameters(), strict=True)
    errors = [
        (mine.detach().double() - theirs.detach().double()).abs().flatten() / theirs.detach().double().abs().max()
        for (name, mine), (_, theirs) in pairs
        if "lora_" in name
    ]
    return torch.cat(errors).numpy()


def test_three_steps_of_adapters_are_those_of_peft(checkpoint, rows, tmp_path):
    # With an epsilon above the rounding errors of gradients; see the next test.
    first, trainer = three_steps(checkpoint, rows, tmp_path, 1e-2)
    losses, model = steps_of_peft(checkpoint("qwen3"), first, trainer.data.examples, 1e-2, torch.float64)
    np.testing.assert_allclose([line["loss"] for line in training.metrics(tmp_path / "out")], losses, rtol=1e-5)
    found = peft.PeftModel.from_pretrained(base_model(checkpoint("qwen3")), str(tmp_path / "out"))
    assert element_errors(found, model).max() < 1e-5


@pytest.mark.slow
def test_with_the_default_epsilon_elements_are_as_near_to_float64_as_those_of_peft(checkpoint, rows, tmp_path):
    """AdamW divides each element's gradient by its size: of one as small as its rounding error, it makes a whole step
    whose direction is that error's. So no two programs in float32 agree to 1e-5 in every element."""
    first, trainer = three_steps(checkpoint, rows, tmp_path, 1e-8)
    base, examples = checkpoint("qwen3"), trainer.data.examples
    losses, exact = steps_of_peft(base, first, examples, 1e-8, torch.float64)
    _, rounded = steps_of_peft(base, first, examples, 1e-8, torch.float32)
    found = peft.PeftModel.from_pretrained(base_model(base), str(tmp_path / "out"))
    mine, theirs = element_errors(found, exact), element_errors(rounded, exact)
    for name, errors in (("jaxis", mine), ("PEFT", theirs)):
        print(f"\n| {name} | {errors.max():.1e} | {errors.mean():.1e} | {(errors < 1e-5).mean():.2%} |")
    np.testing.assert_allclose([line["loss"] for line in training.metrics(tmp_path / "out")], losses, rtol=1e-5)
    assert (mine < 1e-5).mean() > 0.999
    assert mine.mean() < 2 * theirs.mean()
    assert mine.max() < 1e-3


def test_steps_of_adamw_are_those_of_torch_in_float64():
    generator = np.random.default_rng(0)
    start = generator.normal(size=(16, 8))
    gradients = generator.normal(size=(5, 16, 8)) * 10.0 ** generator.integers(-6, 1, (16, 8))
    optimizer = make_optimizer(TrainingParams(weight_decay=0.01), lambda _: jnp.asarray(0.1))
    trained = jnp.asarray(start, jnp.float32)
    state, expected = optimizer.init(trained), torch.nn.Parameter(torch.tensor(start))
    theirs = torch.optim.AdamW([expected], lr=0.1, weight_decay=0.01)
    for gradient in gradients:
        update, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state, trained)
        trained += jnp.asarray(update)
        expected.grad = torch.tensor(gradient)
        theirs.step()
    np.testing.assert_allclose(trained, expected.detach(), rtol=1e-6, atol=1e-6)


def test_steps_of_muon_are_those_of_torch_in_float64(monkeypatch):
    # Where torch rounds to bfloat16 before it iterates.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    generator = np.random.default_rng(0)
    shapes = {"tall": (48, 16), "wide": (16, 40), "experts": (3, 16, 24), "embeddings": (64, 16), "norm": (16,)}
    start = {name: generator.normal(size=shape) for name, shape in shapes.items()}
    params = TrainingParams(optimizer="muon", weight_decay=0.01)
    axes = {"embeddings": ("vocab", "embed"), "wide": ("mlp", "embed")}
    optimizer = make_optimizer(params, lambda _: jnp.asarray(0.1), axes)
    trained = {name: jnp.asarray(array, jnp.float32) for name, array in start.items()}
    state = optimizer.init(trained)

    theirs = {name: torch.tensor(array) for name, array in start.items()}
    # Each expert is a matrix of its own, in the memory of the whole.
    matrices = [torch.nn.Parameter(each) for each in (theirs["tall"], theirs["wide"], *theirs["experts"])]
    others = [torch.nn.Parameter(theirs[name]) for name in ("embeddings", "norm")]
    muon = torch.optim.Muon(matrices, lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    decays = [{"params": [each], "weight_decay": decay} for each, decay in zip(others, (0.01, 0.0), strict=True)]
    adamw = torch.optim.AdamW(decays, lr=0.1)
    for _ in range(5):
        gradients = {name: generator.normal(size=shape) for name, shape in shapes.items()}
        updates, state = optimizer.update(
            {name: jnp.asarray(each, jnp.float32) for name, each in gradients.items()}, state, trained
        )
        trained = {name: trained[name] + updates[name] for name in trained}
        in_order = [
            gradients["tall"],
            gradients["wide"],
            *gradients["experts"],
            gradients["embeddings"],
            gradients["norm"],
        ]
        for each, gradient in zip([*matrices, *others], in_order, strict=True):
            each.grad = torch.tensor(gradient)
        muon.step()
        adamw.step()
    for name, expected in theirs.items():
        np.testing.assert_allclose(trained[name], expected, rtol=1e-4, atol=1e-4, err_msg=name)
