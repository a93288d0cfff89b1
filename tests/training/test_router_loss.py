"""The loss that balances routers is that of transformers, padding left out: its value, and the gradient with it.

`pytest -s -m "" tests/training/test_router_loss.py` prints a row of a table for each family.
"""

import json
import shutil

import numpy as np
import pytest
import torch

from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.training.base_model import open_base_model
from jaxis.training.batches import Batches, BatchShape
from jaxis.training.trainable import make_trainable, router_coefficient
from tests.support import parity, training
from tests.support.parity import FAMILIES
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import write_tokenizer
from tests.training.gradients import check_gradients, in_float64, largest_error, random_examples, saved_gradients

COEFFICIENT = 0.5
WITH_LOSS = {
    *("MixtralConfig", "Qwen2MoeConfig", "Qwen3MoeConfig", "Qwen3VLMoeConfig", "OlmoeConfig", "FlexOlmoConfig"),
    *("GptOssConfig", "GraniteMoeConfig", "GraniteMoeSharedConfig", "GraniteMoeSWAConfig", "GraniteMoeHybridConfig"),
    *("PhimoeConfig", "JambaConfig", "MiniMaxM2Config", "Ernie4_5_MoeConfig", "Qwen3NextConfig", "LagunaConfig"),
    *("Qwen3_5MoeTextConfig", "Qwen3_5MoeConfig", "MellumConfig", "FlintConfig", "Glm4vMoeConfig"),
}
ROWS = [
    family
    for family in FAMILIES
    if family.config_class in WITH_LOSS and family.config.get("num_local_experts") != 0  # Granite 4 may have none
]
KWARGS = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}


def config_of(family, tmp_path, forward_pass="plain", **model_kwargs):
    folder = tmp_path / "model"
    shutil.copytree(parity.checkpoint_folder(family), folder)
    write_tokenizer(folder)
    rows = training.write_rows(tmp_path / "rows.jsonl", [training.dialogue("Say hello.", "Hello!")])
    return training.train_config(folder, rows, tmp_path / "out", model_kwargs=model_kwargs, forward_pass=forward_pass)


def reference_losses(model, examples):
    """The loss of learned tokens and that of routers, of examples in one padded batch."""
    longest = max(len(example.ids) for example in examples)
    ids, learned, is_token = (np.zeros((len(examples), longest), np.int64) for _ in range(3))
    for i, example in enumerate(examples):
        ids[i, : len(example.ids)], learned[i, : len(example.ids)] = example.ids, example.learned
        is_token[i, : len(example.ids)] = 1
    output = model(torch.tensor(ids), attention_mask=torch.tensor(is_token), output_router_logits=True, use_cache=False)
    logprobs = torch.log_softmax(output.logits[:, :-1], -1).gather(2, torch.tensor(ids[:, 1:, None]))[..., 0]
    is_learned = torch.tensor(learned[:, 1:] > 0)
    return -logprobs[is_learned].sum() / is_learned.sum(), output.aux_loss


@pytest.mark.slow
@pytest.mark.parametrize("forward_pass", ["plain", pytest.param("engine", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family", quick_rows(ROWS, [f for f in ROWS if f.name == "Qwen3 MoE"]), ids=lambda family: family.name
)
def test_the_loss_of_routers_and_its_gradient_are_those_of_transformers(family, forward_pass, tmp_path):
    config = config_of(family, tmp_path, forward_pass, **KWARGS)
    base = open_base_model(config)
    assert router_coefficient(config, base) == COEFFICIENT
    model = make_trainable(config, base, ProgressDisplay(enabled=False))
    examples = random_examples()
    batch = Batches([(each,) for each in examples], BatchShape(1, 2, 64), seed=None).batch(0)
    total, gradient, weight = training.gradients(model, batch, COEFFICIENT)

    reference = parity.reference_model(family)
    reference.zero_grad()
    loss, routers = reference_losses(reference, examples)
    (loss + COEFFICIENT * routers).backward()
    expected_loss = loss.item() + COEFFICIENT * routers.item()
    loss_error = abs(total / weight - expected_loss) / expected_loss
    expected = saved_gradients(family, reference, tmp_path / "gradients")
    errors = {
        name: largest_error(mine / weight, theirs)
        for name, theirs in expected.items()
        if np.abs(theirs).max() > 1e-6 and (mine := model.places.tensor_of(name, gradient)) is not None
    }
    worst = max(errors, key=errors.__getitem__)
    print(f"\n| {family.name} | {routers.item():.4f} | {loss_error:.1e} | {errors[worst]:.1e} | {worst} |")
    assert loss_error < 1e-5

    def exact():
        model = in_float64(reference)
        loss, routers = reference_losses(model, examples)
        (loss + COEFFICIENT * routers).backward()
        return saved_gradients(family, model, tmp_path / "exact")

    check_gradients(errors, lambda name: model.places.tensor_of(name, gradient) / weight, expected, exact)


def test_config_json_turns_the_loss_of_routers_on_and_a_family_without_refuses_it(checkpoint, tmp_path):
    family = next(f for f in ROWS if f.name == "Qwen3 MoE")
    config = config_of(family, tmp_path)
    assert router_coefficient(config, open_base_model(config)) == 0
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"output_router_logits": True}))
    assert router_coefficient(config, open_base_model(config)) == 0.001
    refused = training.train_config(checkpoint("qwen3"), tmp_path / "rows.jsonl", tmp_path / "o", model_kwargs=KWARGS)
    with pytest.raises(ConfigError, match=r"output_router_logits cannot be honoured: .* has no loss that balances"):
        router_coefficient(refused, open_base_model(refused))
