"""The example configuration for a checkpoint answers its conversations with each family, as a tiny random model."""

import dataclasses
import functools
from pathlib import Path

import pytest

from jaxis.inference import InferenceConfig, JAXInferenceEngine
from jaxis.models.registry import built_in_models, get_model_class
from tests.support import parity
from tests.support.places import REPOSITORY
from tests.support.tiny_checkpoints import VOCAB_SIZE, write_tokenizer

EXAMPLES = REPOSITORY / "examples" / "configs"


@functools.cache
def families():
    """A row of the parity table for each module of models."""
    rows = {}
    for family in parity.FAMILIES:
        architecture = family.architecture or type(parity.reference_model(family)).__name__
        rows.setdefault(get_model_class([architecture]).__module__.rpartition(".")[2], family)
    return rows


def built_in_modules():
    modules = {model.__module__.rpartition(".")[2] for model in built_in_models().values()}
    return sorted(modules - {"muse_glimmer"})  # is in the table of towers


@pytest.mark.slow
@pytest.mark.parametrize("module", built_in_modules())
def test_it_answers_its_conversations(module, tmp_path):
    family = families()[module]
    old_size = parity.SIZES["vocab_size"]
    tables = {key: VOCAB_SIZE for key, size in family.config.items() if size == old_size and "vocab_size" in key}
    family = dataclasses.replace(family, config=family.config | tables | {"vocab_size": VOCAB_SIZE})
    folder = Path(parity.checkpoint_folder(family))
    write_tokenizer(folder)
    config = InferenceConfig.from_yaml(EXAMPLES / "model.yaml")
    model = dataclasses.replace(config.model, model_name=str(folder), model_max_length=512)
    generation = dataclasses.replace(config.generation, max_new_tokens=8)
    with JAXInferenceEngine(model, show_progress=False) as engine:
        results = engine.infer(
            inference_config={
                "generation": generation,
                "input_path": EXAMPLES / "conversations.jsonl",
                "output_path": tmp_path / "out.jsonl",
            }
        )
    assert [result.conversation_id for result in results] == ["capital", "sum", "colour"]
    assert all(result.messages[-1].role == "assistant" for result in results)
