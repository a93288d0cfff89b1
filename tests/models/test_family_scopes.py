"""Quantization knows every family's layers by their checkpoint's names, also where the model is a part of another."""

import ast
import importlib
import json
from pathlib import Path

import pytest

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.config.usual_keys import with_defaults
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.module import named_modules
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.text_part import InnerTextPart, TextPart
from jaxis.models.model_loader import construct_abstractly
from jaxis.models.registry import built_in_models, get_model_class, register_model
from tests.support.places import TESTS

FOLDER = TESTS / "data" / "configs"
NUM_LAYERS = 4


def text_config_of(architecture: str) -> dict:
    """A published config.json of the architecture with few layers, or tiny one where there is no such file."""
    for path in sorted(FOLDER.glob("*.json")):
        values = with_defaults(json.loads(path.read_text()))
        published = values["architectures"][0]
        if published == architecture.replace("ForCausalLM", "ForConditionalGeneration") and "text_config" in values:
            values, published = values["text_config"] | {"architectures": [architecture]}, architecture
        if published.lower() == architecture.lower():  # a reference may spell a name differently
            of_layers = {
                key: value[:NUM_LAYERS]
                for key, value in values.items()
                if isinstance(value, list | str) and len(value) == values["num_hidden_layers"]
            }
            unshared = {key: 0 for key in ("num_kv_shared_layers",) if key in values}
            return values | of_layers | unshared | {"num_hidden_layers": NUM_LAYERS, "quantization_config": None}
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return {"architectures": [architecture], "num_hidden_layers": NUM_LAYERS, "rms_norm_eps": 1e-6, **sizes}


TEXT_MODELS = sorted(name for name in built_in_models() if name.endswith("ForCausalLM"))
# Whose required keys only their makers' config classes fill in; their layers are those of families that are here.
WITHOUT_CONFIG = {
    "BailingHybridForCausalLM",  # published as BailingMoeV3ForCausalLM, in groups of more layers
    "BambaForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "Lfm3ForCausalLM",
    "Llama4ForCausalLM",
    "Mamba2ForCausalLM",
    "Mistral4ForCausalLM",
    # Of which no published config.json is here.
    *("AXK1ForCausalLM", "ExaoneForCausalLM", "FalconForCausalLM", "FlexOlmoForCausalLM", "FlintForCausalLM"),
    *("GPTJForCausalLM", "GPTNeoForCausalLM", "GPTNeoXForCausalLM", "Jais2ForCausalLM"),
    *("GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM", "NemotronForCausalLM"),
    *("BailingMoeV2_5ForCausalLM", "LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"),
    "Longcat2ForCausalLM",
    *("BailingMoeV2ForCausalLM", "Kolibri1ForCausalLM", "MiniCPMForCausalLM", "MiniCPM3ForCausalLM"),
    *("BioGptForCausalLM", "DoryForCausalLM", "HYV4ForCausalLM", "KimiK3ForCausalLM", "LaraMiniForCausalLM"),
    *("MiniMaxM3SparseForCausalLM", "PersimmonForCausalLM", "Qwen4ExpForCausalLM", "Step5ForCausalLM"),
    *(
        "DeepseekV4ForCausalLM",
        "DeepseekV41ForConditionalGeneration",
    ),  # whose connections of streams are tensors, not modules, in checkpoints
    *("CodeGenForCausalLM", "OlmoForCausalLM", "PhiForCausalLM", "SolarOpenForCausalLM", "YoutuForCausalLM"),
}


class AskedForMethods:
    """A quantization that quantizes nothing, and remembers the names that it was asked for."""

    def __init__(self) -> None:
        self.unquantized = self
        self.prefixes: list[str] = []

    def get_quant_method(self, layer: object, prefix: str) -> None:
        self.prefixes.append(prefix)

    def check_all_used(self) -> None:
        pass


@pytest.mark.sampled(8)
@pytest.mark.parametrize("naming", [TextPart, pytest.param(InnerTextPart, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", [name for name in TEXT_MODELS if name not in WITHOUT_CONFIG])
def test_a_family_is_held_by_a_text_part_under_its_modules_names(architecture, naming):
    family = get_model_class([architecture])
    assert issubclass(family, CausalLM)

    class Holder(naming, family):
        other_parts = ()
        other_keys = ()

    values = text_config_of(architecture)
    Holder.text_model_types = (values.get("model_type"),)
    register_model("HolderForTests", Holder)
    config = HFConfig({"architectures": ["HolderForTests"], "text_config": values})
    asked = AskedForMethods()
    model = construct_abstractly(VllmConfig(ModelConfig("held", config), quant_config=asked))
    names = checkpoint_names_of(model)
    here = {name for name, module in named_modules(model) if hasattr(module, "quant_method")}
    modules = {names.name_in_checkpoint(name) for name in here}
    assert {names.name_here(name) for name in modules} == here
    assert len(asked.prefixes) == len(set(asked.prefixes))
    assert set(asked.prefixes) == modules
    if any(name_here in ("model", "model.layers") for _, name_here in family.renames):
        return  # no text part has the decoder under a name of its own
    (decoder, _), *of_head = naming.text_renames
    outside = {name for name in modules if not name.startswith(f"{decoder}.")}
    heads = {old for old, new in family.renames if new == "lm_head"}
    assert outside <= {name for name, _ in of_head} | {"lm_head"} | heads


@pytest.mark.parametrize("architecture", TEXT_MODELS)
def test_only_the_shared_class_has_the_guides_constructor(architecture):
    family = get_model_class([architecture])
    assert family.__init__ is CausalLM.__init__


def test_families_do_not_import_each_other():
    """Parts that two of them share are in models/common."""
    families = {model.__module__ for model in built_in_models().values()}
    for family in families:
        tree = ast.parse(Path(importlib.import_module(family).__file__).read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not imported & families, family
