"""`jaxis analyze` on a checkpoint of every family, as transformers saves it."""

import json
import math
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from jaxis.bringup.analyze.analysis import analyze
from tests.support.parity import EVERY_KIND, FAMILIES, checkpoint_folder
from tests.support.quick_rows import quick_rows

# What transformers saves of the parts that see and hear, and does not need for text.
# Tables of n-grams stay in the file.
UNUSED = re.compile(
    r"image_newline$|audio_tower\.|multi_modal_projector\.|ngram_embeddings\.embedders\.|engram\.embed\."
    r"|\.ple_embedding\.|\.bias_vl$|\.ssmax_s$"
)
# Rates of heads that Kimi K3's files have beyond the model's, and rows of a head beyond the ids of tokens.
PADDING = {"Kimi K3": 15, "Inkling": 5 * 64, "Inkling 2": 5 * 64}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "family", quick_rows(FAMILIES, [f for f in FAMILIES if f.name in EVERY_KIND]), ids=lambda family: family.name
)
def test_a_family_of_ours_is_understood_completely(family):
    folder = checkpoint_folder(family)
    analysis = analyze(folder)
    assert (analysis.findings, analysis.not_checked) == ((), "")
    assert {key.use for key in analysis.keys} <= {"used", "default", "neutral", "ignored"}
    with safe_open(Path(folder, "model.safetensors"), "numpy") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert analysis.num_tensors == len(sizes)
    # Llama 3.2 Vision has whole layers for images.
    layers = tuple({f"{name.partition('.cross_attn')[0]}." for name in sizes if ".cross_attn" in name})
    unused = sum(size for name, size in sizes.items() if UNUSED.search(name) or name.startswith(layers))
    unused += PADDING.get(family.name, 0)
    assert analysis.sizes.parameters.total == sum(sizes.values()) - unused
    # Whatever is read counts as a key; nothing of the file is left out.
    config = json.loads(Path(folder, "config.json").read_text())
    assert {key.key.partition(".")[0] for key in analysis.keys} == set(config)
