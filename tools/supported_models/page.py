"""The page as Markdown."""

from __future__ import annotations

import functools

from jaxis.models.common.family import Family
from jaxis.models.registry import built_in_families
from tests.support.published_models import PUBLISHED, read

# The files of src/jaxis/models whose rows come first, popular ones before others; the rest follow by name.
_FIRST = (
    *("llama", "llama4", "mistral", "mixtral", "qwen2_moe", "qwen2", "qwen3", "qwen3_moe", "qwen3_next"),
    *("qwen3_5", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "gpt_oss"),
    *("glm4_moe", "glm4_moe_lite", "minimax_m2", "hy_v3", "hunyuan_v1_moe", "afmoe", "laguna", "mellum", "dots1"),
    *(
        "glm",
        "glm4",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma4",
        "phi3",
        "phimoe",
        "olmo2",
        "olmo3",
        "olmoe",
        "granite",
        "granitemoe",
    ),
    *("starcoder2", "cohere", "cohere2", "cohere2_moe", "smollm3", "seed_oss", "exaone4", "exaone_moe"),
    *("ernie4_5", "ernie4_5_moe", "mistral3", "lfm2", "lfm2_moe", "lfm3", "nemotron_h", "granitemoehybrid"),
    *("phi", "stablelm", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "exaone", "nemotron", "llava"),
    *("falcon_h1", "bamba", "mamba2", "hunyuan_v1_dense", "apertus", "muse_glimmer", "kimi_linear"),
    *("bailing_hybrid", "olmo_hybrid", "mimo_v2_flash", "step3p5", "mistral4", "gemma3n", "jamba", "mamba"),
)

HEAD = """\
# Supported models

```console
$ jaxis analyze Qwen/Qwen3-30B-A3B      # does this one run? reads config.json and headers only
```

<!-- Written by `python -m tools.supported_models` from the declarations at the end of src/jaxis/models/*.py:
     change those, and run it. -->

A checkpoint runs if `architectures` in its config.json names one of the classes below and `jaxis analyze MODEL` reports
nothing that is missing. Each family is compared with `transformers` in the tests, with tiny random weights in float32:
layer by layer, in its logits, through the paged cache and in what it generates; [`jaxis verify`](bring-up.md#verify)
does the same with a checkpoint. [Adding a model](adding-a-model.md) explains how to add a family.

*Checked* names the published models whose config.json is in the tests: every key of it is understood, and the model has
as many parameters as its makers say. *Quantized* names the formats in which makers publish the family and that load as
they are, and the architectures of [GGUF files](loading.md#gguf-files) that load; more formats of other tools
[load](quantization.md#formats-that-load), too.

| models | architecture | what is special about it | checked | quantized |
|---|---|---|---|---|
"""
TAIL = """
Multi-token prediction layers (`num_nextn_predict_layers`: DeepSeek V3, R1, GLM, Step 3.5) come after the model's own
layers in a checkpoint. The logits do not depend on them, and they are loaded only to draft tokens
([speculative decoding](speculative-decoding.md#layers-that-draft)).

## Memory of recurrent states

A layer with a recurrent state keeps a fixed number of bytes for each sequence, however long it is. The engine has slots
of this size beside the blocks of keys and values: one for each running sequence, one for what each keeps at the end of
its prompt, and up to 64 for ended conversations. States are in float32. As `jaxis analyze` prints them, with bfloat16
activations and cache:

| model | layers with a state | state of a sequence | keys and values of a token | the state is as much as |
|---|---|---|---|---|
| Qwen3.5-27B | 48 of 64 | 146.8 MiB | 64 KiB | 2,349 tokens |
| Qwen3-Next-80B-A3B | 36 of 48 | 73.7 MiB | 24 KiB | 3,144 tokens |
| Kimi-Linear-48B-A3B | 20 of 27 | 41.4 MiB | 7.9 KiB | 5,384 tokens |
| Nemotron-3-Nano-30B-A3B | 23 of 52 | 46.8 MiB | 6 KiB | 7,989 tokens |
| LFM2-8B-A1B | 18 of 24 | 0.14 MiB | 12 KiB | 12 tokens |
| Falcon-Mamba-7B | 64 of 64 | 35.0 MiB | none | |

A decode step reads and writes a sequence's states whole.
"""


def page() -> str:
    """The page, as Markdown."""
    return HEAD + "".join(f"{_row(family)}\n" for family in sorted(built_in_families(), key=_place)) + TAIL


def _place(family: Family) -> int:
    name = family.classes[0].__module__.rpartition(".")[2]
    return _FIRST.index(name) if name in _FIRST else len(_FIRST)


def _row(family: Family) -> str:
    files = ", ".join(f"`{name}`" for name in family.gguf_architectures)
    cells = (
        family.models,
        ", ".join(f"`{model.__name__}`" for model in family.classes),
        family.parts,
        ", ".join(_checked(family)),
        ", ".join((*family.formats, *([f"GGUF {files}"] if files else []))),
    )
    return f"| {' | '.join(cells)} |"


def _checked(family: Family) -> list[str]:
    """The family's models in tests/data/published_models.yaml of which a public source proves all keys."""
    return [model for model, names in _proved_models() if not family.architectures.keys().isdisjoint(names)]


@functools.cache
def _proved_models() -> list[tuple[str, list[str]]]:
    """The names of such models of all families, and their architectures."""
    return [
        (published.model.partition("/")[2], read(name)["architectures"])
        for name, published in PUBLISHED.items()
        if published.source and not published.unproved
    ]
