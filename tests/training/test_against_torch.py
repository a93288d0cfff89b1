"""Losses, gradients and steps are those of transformers, PEFT and PyTorch in float32."""

import copy
import shutil

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from jaxis.host.progress import ProgressDisplay
from jaxis.training.base_model import open_base_model
from jaxis.training.batches import Batches, BatchShape
from jaxis.training.examples import Example
from jaxis.training.trainable import make_trainable
from jaxis.training.trainer import Trainer
from tests.support import parity, training
from tests.support.adapters import base_model
from tests.support.parity import FAMILIES
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import write_checkpoint

LENGTHS = (23, 9)
# One of each kind of attention, state, position, expert, and layout of the checkpoint.
CHECKED = {
    *("Qwen3, tied", "Qwen3 MoE", "Llama 3", "Gemma 3", "Phi-3, longrope", "GPT-2", "GPT-OSS", "Mixtral", "Llama 4"),
    *(
        "Gemma 3n",
        "DeepSeek V3",
        "DeepSeek V3.2",
        "Kimi Linear",
        "Qwen3.5",
        "LFM2",
        "Mamba2",
        "Falcon-H1",
        "Jamba",
        "Nemotron 3",
    ),
}
# Both sides round in float32, here sums over time or over several streams.
MAX_ERRORS = {"Gemma 3n": 2e-5, "Qwen3.5": 2e-5, "Jamba": 2e-5, "Nemotron 3": 2e-5}
ROWS = [
    training.dialogue("Where is the cat?", "On the mat.", "And now?", "Under it, I think."),
    training.dialogue("Count.", "One, two, three."),
    training.dialogue("Say hello.", "Hello!"),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return training.write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


def random_examples():
    rng = np.random.default_rng(0)
    return [
        Example(
            np.asarray(parity.prompt(length), np.int32), np.concatenate([[False], rng.random(length - 1) < 0.6]), ""
        )
        for length in LENGTHS
    ]


def largest_error(found, expected):
    return np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30)


def write_untrained_tokenizer(folder, tmp_path):
    """Any tokenizer: what is compared is made of token ids."""
    for path in write_checkpoint(tmp_path / "with_tokenizer", "qwen2").glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())


def saved_gradients(family, model, folder):
    """The gradients under the names and in the shapes in which the model's weights are saved."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
            mine.copy_(torch.zeros_like(theirs) if theirs.grad is None else theirs.grad)
        for buffer in copied.buffers():
            buffer.zero_()
    copied.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    return parity._RENAMED.get(family.config_class, dict)(tensors)


@pytest.mark.parametrize(
    "family",
    quick_rows([f for f in FAMILIES if f.name in CHECKED], [f for f in FAMILIES if f.name == "Qwen3, tied"]),
    ids=lambda family: family.name,
)
def test_loss_and_gradients_of_packed_sequences_are_those_of_torch(family, rows, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(parity.checkpoint_folder(family), folder)
    write_untrained_tokenizer(folder, tmp_path)
    config = training.train_config(folder, rows, tmp_path / "out", enable_gradient_checkpointing=True)
    model = make_trainable(config, open_base_model(config), ProgressDisplay(enabled=False))
    examples = random_examples()
    batch = Batches([(each,) for each in examples], BatchShape(1, 1, 48), seed=None, packs=True).batch(0)
    total, gradient, weight = training.gradients(model, batch)

    reference = parity.reference_model(family)
    reference.zero_grad()
    loss = training.torch_loss(reference, examples)
    loss.backward()
    assert abs(total / weight - loss.item()) < 1e-5 * loss.item()
    expected = saved_gradients(family, reference, tmp_path / "gradients")
    compared = 0
    for name, theirs in expected.items():
        if (mine := model.places.tensor_of(name, gradient)) is not None and np.any(theirs):
            compared += mine.size
            if name.endswith("embed_tokens_per_layer.weight"):
                mine = mine.copy()
                mine[0] = 0  # of which torch derives nothing: the padding token's, and of tokens past the table
            assert largest_error(mine / weight, theirs) < MAX_ERRORS.get(family.name, 1e-5), name
    assert compared > 0.8 * sum(value.size for value in gradient.values())


def test_three_steps_of_adapters_are_those_of_peft(checkpoint, rows, tmp_path):
    # Where a gradient is as small as its rounding error, AdamW makes whole steps of that error: hence the epsilon.
    epsilon = 1e-2
    settings = {"adam_epsilon": epsilon, "weight_decay": 0.01, "lr_scheduler_type": "cosine", "warmup_steps": 1}
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3}
    config = training.train_config(
        checkpoint("qwen3"), rows, tmp_path / "out", peft={"lora_r": 4, "lora_alpha": 8}, **settings, **batch
    )
    trainer = Trainer(config, lambda _: None)
    start = make_trainable(config, trainer.base, ProgressDisplay(enabled=False))
    first = tmp_path / "first"
    first.mkdir()
    start.write(first, {name: np.asarray(value) for name, value in start.initial.items()})
    training.run(config)

    model = peft.PeftModel.from_pretrained(base_model(checkpoint("qwen3")), str(first), is_trainable=True).double()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01, eps=epsilon)
    schedule = transformers.get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = training.torch_loss(model, trainer.data.examples)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    np.testing.assert_allclose([line["loss"] for line in training.metrics(tmp_path / "out")], losses, rtol=1e-5)
    found = peft.PeftModel.from_pretrained(base_model(checkpoint("qwen3")), str(tmp_path / "out"))
    pairs = zip(model.named_parameters(), found.named_parameters(), strict=True)
    errors = {
        name: largest_error(mine.detach().numpy(), theirs.detach().numpy()) for (name, theirs), (_, mine) in pairs
    }
    assert max(errors.values()) < 1e-5, errors
