"""The published models whose config.json is in tests/data/configs: where each was found, and what its makers say of it.

The files have the keys and values of the originals; a copy that a tool quantized is without its `quantization_config`.
A new file gets an entry here, in alphabetical order, and then `python -m tools.supported_models` writes docs/models.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.support.places import TESTS

FOLDER = TESTS / "data" / "configs"

AICONFIGURATOR = "github.com/ai-dynamo/aiconfigurator: aic-core/src/aiconfigurator_core/model_configs"
MAXTEXT = "github.com/AI-Hypercomputer/maxtext: src/maxtext/checkpoint_conversion/utils/hf_model_configs.py"
MLC = "github.com/mlc-ai/mlc-llm: python/mlc_llm/model/model_preset.py"
SDPYTHON = "github.com/sdpython/experimental-experiment: experimental_experiment/torch_models/llm_model_helper.py"
UNKNOWN = "counted in a way that its makers do not say"


@dataclass(frozen=True)
class Published:
    """A published model.

    Attributes:
      model: Its id on the Hub.
      source: Where a copy of its config.json is public; None where none was found again, so that nothing proves the
        values.
      parameters: In billions, as its card, its report or its name says; without encoders of images and audio, and
        without layers for multi-token prediction.
      active: (Those active for a token in billions, "with embeddings", "without", "without head" either, or UNKNOWN);
        None where all are.
      cache_bytes: Of a token in bfloat16: 2 (keys, values) x layers x heads x size x 2, or layers x latent x 2.
      unproved: Which keys `source` does not prove.
      is_cut: Whether `parameters` is cut to whole billions instead of rounded.
    """

    model: str
    source: str | None
    parameters: float
    active: tuple[float, str] | None
    cache_bytes: int
    unproved: str = ""
    is_cut: bool = False


def read(name: str) -> dict[str, Any]:
    """The config.json of a file in tests/data/configs."""
    return json.loads((FOLDER / f"{name}.json").read_text())


PUBLISHED: dict[str, Published] = {
    "aya-23-8b": Published("CohereLabs/aya-23-8B", MLC, 8.03, None, 2 * 32 * 8 * 128 * 2),
    # Keys of ALiBi are longer than those of the model, here and in MPT.
    "bloom-560m": Published(
        "bigscience/bloom-560m",
        "the keys of BLOOM in github.com/huggingface/transformers-bloom-inference, and sizes of bloomz-560m in tests",
        0.559,
        None,
        2 * 24 * 16 * 80 * 2,
        unproved="attention_softmax_in_fp32 and other settings are those of the larger model",
    ),
    "command-r": Published("CohereLabs/c4ai-command-r-v01", None, 35, None, 2 * 40 * 64 * 128 * 2),
    "command-r7b": Published("CohereLabs/c4ai-command-r7b-12-2024", None, 8.03, None, 2 * 32 * 8 * 128 * 2),
    "deepseek-r1": Published(
        "deepseek-ai/DeepSeek-R1",
        f"{AICONFIGURATOR}/deepseek-ai--DeepSeek-R1_config.json",
        671,
        (37, "without"),
        61 * 576 * 2,
    ),
    "deepseek-v2-lite": Published("deepseek-ai/DeepSeek-V2-Lite", MAXTEXT, 15.7, (2.4, "without"), 27 * (512 + 64) * 2),
    "deepseek-v2.5": Published("deepseek-ai/DeepSeek-V2.5", None, 236, (21, "without"), 60 * 576 * 2),
    "deepseek-v3": Published(
        "deepseek-ai/DeepSeek-V3",
        f"{AICONFIGURATOR}/deepseek-ai--DeepSeek-V3_config.json",
        671,
        (37, "without"),
        61 * 576 * 2,
    ),
    "deepseek-v3.2": Published(
        "deepseek-ai/DeepSeek-V3.2-Exp",
        f"{AICONFIGURATOR}/deepseek-ai--DeepSeek-V3.2_config.json",
        671,
        (37, "without"),
        61 * (576 + 128) * 2,
    ),
    "dots.llm1": Published(
        "rednote-hilab/dots.llm1.base",
        "huggingface.co/rednote-hilab/dots.llm1.base/blob/refs%2Fpr%2F4/config.json",
        142.8,
        (14, "with embeddings"),
        2 * 62 * 32 * 128 * 2,
    ),
    "ernie-4.5-0.3b": Published("baidu/ERNIE-4.5-0.3B-PT", None, 0.36, None, 2 * 18 * 2 * 128 * 2),
    "ernie-4.5-21b-a3b": Published(
        "baidu/ERNIE-4.5-21B-A3B-PT",
        "test fixtures of other engines (ERNIE 4.5 MoE configs in MLXLocalModels and llm-memory-calculator)",
        21.83,
        (3.35, "without"),
        2 * 28 * 4 * 128 * 2,
        unproved="only the keys that these name; the file has more",
    ),
    "ernie-4.5-300b-a47b": Published(
        "baidu/ERNIE-4.5-300B-A47B-PT",
        "test fixtures of PaddlePaddle/FastDeploy (all but depth) and of MindIE atb_llm (depth, moe_k, first "
        "and last layer of experts)",
        299.5,
        (47, "with embeddings"),
        2 * 54 * 8 * 128 * 2,
        unproved="moe_gate and tie_word_embeddings, of which the two say different things",
    ),
    "falcon-h1-0.5b": Published(
        "tiiuae/Falcon-H1-0.5B-Instruct",
        "github.com/NVIDIA-NeMo/Megatron-Bridge: tests/unit_tests/models/falcon_h1/test_falcon_h1_bridge.py",
        0.521,
        None,
        2 * 36 * 2 * 64 * 2,
        unproved="mamba_d_ssm is not in that copy",
    ),
    "falcon-mamba-7b": Published("tiiuae/falcon-mamba-7b", SDPYTHON, 7.27, None, 0),
    "gemma-2-2b": Published("google/gemma-2-2b-it", MLC, 2.61, None, 2 * 26 * 4 * 256 * 2),
    "gemma-2-9b": Published("google/gemma-2-9b-it", MLC, 9.24, None, 2 * 42 * 8 * 256 * 2),
    "gemma-2b": Published("google/gemma-2b", MLC, 2.51, None, 2 * 18 * 1 * 256 * 2),
    "gemma-3-1b": Published("google/gemma-3-1b-it", MLC, 1.0, None, 2 * 26 * 1 * 256 * 2),
    "gemma-3n-e2b": Published(
        "google/gemma-3n-E2B-it",
        "github.com/google-ai-edge/ai-edge-torch: generative/examples/gemma3n",
        4.46,
        None,
        2 * 20 * 2 * 256 * 2,
        unproved="other keys than sizes, which are those that loaders of gemma-3n-E4B-it name",
    ),
    "gemma-3n-e4b": Published(
        "google/gemma-3n-E4B-it",
        "github.com/google-ai-edge/ai-edge-torch: generative/examples/gemma3n (sizes of E2B)",
        6.87,
        None,
        2 * 20 * 2 * 256 * 2,
        unproved="all that differs from E2B, which are the keys that loaders of it name",
    ),
    "gemma-4-12b": Published("google/gemma-4-12B-it", None, 11.91, None, 2 * (40 * 8 * 256 + 8 * 512) * 2),
    "gemma-4-26b-a4b": Published(
        "google/gemma-4-26B-A4B",
        f"{AICONFIGURATOR}/google--gemma-4-26B-A4B_config.json",
        25.2,
        (3.8, "without"),
        2 * (25 * 8 * 256 + 5 * 2 * 512) * 2,
    ),
    "gemma-4-31b": Published(
        "google/gemma-4-31B-it",
        f"{AICONFIGURATOR}/nvidia--Gemma-4-31B-IT-NVFP4_config.json, without quantization_config",
        30.7,
        None,
        2 * (50 * 16 * 256 + 10 * 4 * 512) * 2,
    ),
    "gemma-4-e2b": Published(
        "google/gemma-4-E2B",
        MAXTEXT,
        4.63,
        None,
        2 * (12 * 256 + 3 * 512) * 2,
        unproved=(
            "moe_intermediate_size, which that copy calls expert_intermediate_size (both null), and what is "
            "outside text_config"
        ),
    ),
    "gemma-4-e4b": Published("google/gemma-4-E4B", None, 7.46, None, 2 * 2 * (20 * 256 + 4 * 512) * 2),
    "glm-4-9b-0414": Published("zai-org/GLM-4-9B-0414", None, 9.4, None, 2 * 40 * 2 * 128 * 2),
    "glm-4.5": Published(
        "zai-org/GLM-4.5",
        "github.com/alibaba/rtp-llm: .../model_test/fake_test/testdata/glm45/tokenizer/config.json",
        353,
        (32, "without"),
        2 * 92 * 8 * 128 * 2,
    ),
    "glm-4.5-air": Published(
        "zai-org/GLM-4.5-Air",
        "huggingface.co/PrimeIntellect/INTELLECT-3-Base/blob/main/config.json, a fine-tune",
        106,
        (12, UNKNOWN),
        2 * 46 * 8 * 128 * 2,
        unproved="eos_token_id and auto_map are the fine-tune's",
        is_cut=True,
    ),
    "glm-5": Published(
        "zai-org/GLM-5",
        "github.com's omniinfer, with the names of the original from a page on its quantization",
        744,
        (40, "without"),
        78 * (576 + 128) * 2,
    ),
    "glm-5.3": Published(
        "zai-org/GLM-5.3",
        "a test of a GLM runtime, transcribed from huggingface.co/HawkBearPig/GLM-5.3-Int4-Int8Mix-RTN-g64",
        743,
        (40, "without"),
        (78 * 576 + 21 * 128) * 2,
    ),
    "gpt-bigcode-santacoder": Published("bigcode/gpt_bigcode-santacoder", MLC, 1.12, None, 2 * 24 * 1 * 128 * 2),
    "gpt-oss-120b": Published(
        "openai/gpt-oss-120b",
        f"{AICONFIGURATOR}/openai--gpt-oss-120b_config.json",
        116.83,
        (5.13, "without"),
        2 * 36 * 8 * 64 * 2,
    ),
    "gpt-oss-20b": Published(
        "openai/gpt-oss-20b",
        f"{AICONFIGURATOR}/openai--gpt-oss-20b_config.json",
        20.91,
        (3.61, "without"),
        2 * 24 * 8 * 64 * 2,
    ),
    "gpt2": Published("openai-community/gpt2", MLC, 0.124, None, 2 * 12 * 12 * 64 * 2),
    "granite-3.1-1b-a400m": Published(
        "ibm-granite/granite-3.1-1b-a400m-instruct",
        " "
        "huggingface.co/ibm-granite/granite-3.1-1b-a400m-instruct/blame/8290d32ffc403c6d628249af989beb7800c70d77/config.json",
        1.33,
        (0.43, "without"),
        2 * 24 * 8 * 64 * 2,
    ),
    "granite-3.1-3b-a800m": Published(
        "ibm-granite/granite-3.1-3b-a800m-instruct",
        "huggingface.co/ibm-granite/granite-3.1-3b-a800m-instruct/blame/main/config.json",
        3.3,
        (0.88, "without"),
        2 * 32 * 8 * 64 * 2,
    ),
    "granite-3.3-8b": Published("ibm-granite/granite-3.3-8b-instruct", None, 8.17, None, 2 * 40 * 8 * 128 * 2),
    "granite-4.0-h-350m": Published("ibm-granite/granite-4.0-h-350m", None, 0.34, None, 2 * 4 * 4 * 64 * 2),
    "hunyuan-a13b": Published(
        "tencent/Hunyuan-A13B-Instruct",
        "a test fixture of another engine (hunyuanA13BMoEConfigJSON in MLXLocalModels)",
        80.4,
        (13, "with embeddings"),
        2 * 32 * 8 * 128 * 2,
        unproved="hidden_act and max_position_embeddings; model_type, older in the fixture; the file has more keys",
    ),
    "hy-mt2-7b": Published(
        "tencent/Hy-MT2-7B",
        "the file as a public log of Intel AutoRound (2026-05-27, tencent_Hy-MT2-7B-W4A16-RTN) prints it",
        7.5,
        None,
        2 * 32 * 8 * 128 * 2,
    ),
    "hy3-preview": Published(
        "tencent/Hy3-preview",
        "a public profile of tencent/Hy3@716aa72 and test fixtures of mistral.rs and others, which agree",
        295,
        (21, "with embeddings"),
        2 * 80 * 8 * 128 * 2,
        unproved=(
            "token ids, initializer_range, enable_attention_fp32_softmax, enable_moe_fp32_combine, output_router_logits"
        ),
    ),
    "internlm2.5-7b": Published("internlm/internlm2_5-7b-chat", MLC, 7.74, None, 2 * 32 * 8 * 128 * 2),
    "jamba-1.5-mini": Published(
        "ai21labs/AI21-Jamba-1.5-Mini",
        SDPYTHON,
        51.6,
        (12, "with embeddings"),
        2 * 4 * 8 * 128 * 2,
    ),
    "jamba-reasoning-3b": Published(
        "ai21labs/AI21-Jamba-Reasoning-3B",
        "a converter of its checkpoint (scripts/port_jamba_to_forgelm_v2.py)",
        3.03,
        None,
        2 * 2 * 1 * 128 * 2,
        unproved="only the keys that it names; the file has more",
    ),
    "k-exaone-236b-a23b": Published(
        "LGAI-EXAONE/K-EXAONE-236B-A23B",
        "github.com/NVIDIA/TensorRT-LLM: EXAONE_MOE_CONFIG in the test of its EXAONE MoE (with fewer layers)",
        236,
        (23, "with embeddings"),
        2 * 48 * 8 * 128 * 2,
        unproved="num_hidden_layers and the lists of layers, longer than there",
    ),
    "kimi-k2": Published(
        "moonshotai/Kimi-K2-Instruct",
        f"{AICONFIGURATOR}/moonshotai--Kimi-K2-Instruct_config.json",
        1026,
        (32, "without"),
        61 * 576 * 2,
    ),
    "kimi-k2.5": Published(
        "moonshotai/Kimi-K2.5",
        f"{AICONFIGURATOR}/moonshotai--Kimi-K2.5_config.json",
        1026,
        (32, "without"),
        61 * 576 * 2,
    ),
    "kimi-linear-48b-a3b": Published(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "huggingface.co/Firworks/Kimi-Linear-48B-A3B-Instruct-nvfp4, without what it says of quantization",
        49.1,
        (3.1, "without"),
        7 * 576 * 2,
        unproved="keys past the end of the excerpt, which are from another list of its fields",
    ),
    "laguna-xs.2": Published(
        "poolside/Laguna-XS.2",
        "huggingface.co/MuVeraAI/Laguna-XS.2/blob/main/config.json (a copy; seen up to rope_parameters), "
        "github.com/pierre427/mlx2: tests of its Laguna XS 2.1",
        33.4,
        (3.0, "with embeddings"),
        2 * 40 * 8 * 128 * 2,
        unproved="layer_types and what follows it are those of XS 2.1; the file may have more keys",
    ),
    "lfm2-8b-a1b": Published("LiquidAI/LFM2-8B-A1B", None, 8.34, (1.56, "without"), 2 * 6 * 8 * 64 * 2),
    "lfm2.5-350m": Published(
        "LiquidAI/LFM2.5-350M",
        "a test fixture of another engine (deserialize_lfm2_5_config_from_local_shape, Rust), seen up to eos_token_id",
        0.354,
        None,
        2 * 6 * 8 * 64 * 2,
        unproved="the keys after eos_token_id",
    ),
    "ling-3.0-flash": Published("inclusionAI/Ling-3.0-flash", None, 124.4, (5.1, "without"), 7 * 576 * 2),
    "ling-3.0-tiny": Published(
        "inclusionAI/Ling-3.0-tiny",
        "huggingface.co/Edge0/Edge0-8B-A1B-preview, which was made of this model, without the keys of its additions",
        7.9,
        (1.38, "with embeddings"),
        6 * 576 * 2,
        unproved="what that copy may have changed",
    ),
    "llama-2-7b": Published(
        "meta-llama/Llama-2-7b-hf",
        "github.com/AI-Hypercomputer/tpu-recipes: training/archive/v5p/Llama2-7B-PyTorch/config.sh",
        6.74,
        None,
        2 * 32 * 32 * 128 * 2,
        unproved="torch_dtype, transformers_version and use_cache, which that copy changes",
    ),
    "llama-3.1-8b": Published(
        "meta-llama/Llama-3.1-8B",
        f"{AICONFIGURATOR}/meta-llama--Meta-Llama-3.1-8B_config.json",
        8.03,
        None,
        2 * 32 * 8 * 128 * 2,
    ),
    "llama-3.2-1b": Published("meta-llama/Llama-3.2-1B-Instruct", MLC, 1.24, None, 2 * 16 * 8 * 64 * 2),
    "llama-4-maverick": Published(
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
        f"{AICONFIGURATOR}/meta-llama--Llama-4-Maverick-17B-128E-Instruct_config.json",
        400,
        (17, "with embeddings"),
        2 * 48 * 8 * 128 * 2,
    ),
    "llama-4-scout": Published(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        f"{AICONFIGURATOR}/meta-llama--Llama-4-Scout-17B-16E-Instruct_config.json",
        107.8,
        (17, "with embeddings"),
        2 * 48 * 8 * 128 * 2,
    ),
    "mamba-130m": Published("state-spaces/mamba-130m-hf", SDPYTHON, 0.129, None, 0),
    "mamba-2.8b": Published(
        "state-spaces/mamba-2.8b-hf", "github.com/confucianfighter/mamba-2.8b-hf-breakdown: README.md", 2.77, None, 0
    ),
    "mellum2-12b-a2.5b": Published(
        "JetBrains/Mellum2.1-12B-A2.5B-Thinking",
        "github.com/pierre427/mlx2: tests of its Mellum 2.1 adapter, and the fixture MELLUM2_CONFIG of "
        "another engine, which agree",
        12.1,
        (2.5, "with embeddings"),
        2 * 28 * 4 * 128 * 2,
    ),
    "mimo-v2-flash": Published(
        "XiaomiMiMo/MiMo-V2-Flash",
        f"{AICONFIGURATOR}/XiaomiMiMo--MiMo-V2-Flash_config.json",
        309,
        (15, "without"),
        2 * (9 * 4 + 39 * 8) * 192 * 2,
    ),
    "minimax-m2.5": Published(
        "MiniMaxAI/MiniMax-M2.5",
        f"{AICONFIGURATOR}/MiniMaxAI--MiniMax-M2.5_config.json",
        229,
        (10.4, "without"),
        2 * 62 * 8 * 128 * 2,
    ),
    "minimax-m2.7": Published(
        "MiniMaxAI/MiniMax-M2.7",
        f"{AICONFIGURATOR}/MiniMaxAI--MiniMax-M2.7_config.json",
        229,
        (10.4, "without"),
        2 * 62 * 8 * 128 * 2,
    ),
    "ministral-3-3b": Published(
        "mistralai/Ministral-3-3B-Instruct-2512",
        MLC,
        3.43,
        None,
        2 * 26 * 8 * 128 * 2,
        unproved="model_type, which that copy has otherwise",
    ),
    "mistral-7b-v0.1": Published(
        "mistralai/Mistral-7B-v0.1",
        MLC,
        7.24,
        None,
        2 * 32 * 8 * 128 * 2,
        unproved="sliding_window, which that copy calls sliding_window_size",
    ),
    "mistral-small-4-119b": Published(
        "mistralai/Mistral-Small-4-119B-2603",
        "transformers' Mistral4Config, whose defaults are this checkpoint's",
        119,
        (6.5, "with embeddings"),
        36 * (256 + 64) * 2,
    ),
    "mixtral-8x22b": Published(
        "mistralai/Mixtral-8x22B-v0.1",
        f"{AICONFIGURATOR}/mistralai--Mixtral-8x22B-v0.1_config.json",
        140.6,
        (39.1, "with embeddings"),
        2 * 56 * 8 * 128 * 2,
    ),
    "mixtral-8x7b": Published(
        "mistralai/Mixtral-8x7B-v0.1",
        f"{AICONFIGURATOR}/mistralai--Mixtral-8x7B-v0.1_config.json",
        46.7,
        (12.9, "with embeddings"),
        2 * 32 * 8 * 128 * 2,
    ),
    "mpt-7b-instruct": Published(
        "mosaicml/mpt-7b-instruct",
        "a copy in a description of the model, in a fork of github.com/mlc-ai/mlc-llm",
        6.65,
        None,
        2 * 32 * 32 * 144 * 2,
        unproved="the keys after norm_type",
    ),
    "nemotron-3-nano-30b-a3b": Published(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        f"{AICONFIGURATOR}/nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16_config.json",
        31.6,
        (3.2, "without"),
        2 * 6 * 2 * 128 * 2,
    ),
    "nemotron-h-56b": Published(
        "nvidia/Nemotron-H-56B-Base-8K",
        f"{AICONFIGURATOR}/nvidia--Nemotron-H-56B-Base-8K_config.json",
        56.3,
        None,
        2 * 10 * 8 * 128 * 2,
    ),
    "north-mini-code": Published(
        "CohereLabs/North-Mini-Code-1.0",
        "what a driver of github.com/pierre427/mlx2 requires of the published file",
        30.5,
        (3.3, UNKNOWN),
        2 * 49 * 4 * 128 * 2,
        unproved="keys that it does not name",
    ),
    "olmo-2-13b": Published("allenai/OLMo-2-1124-13B", MLC, 13.7, None, 2 * 40 * 40 * 128 * 2),
    "olmo-2-7b": Published(
        "allenai/OLMo-2-1124-7B",
        MLC,
        7.3,
        None,
        2 * 32 * 32 * 128 * 2,
        unproved=(
            "attention_bias, attention_dropout, initializer_range, rope_scaling and token ids are not in that copy"
        ),
    ),
    "olmo-3-7b": Published(
        "allenai/Olmo-3-1025-7B",
        MAXTEXT,
        7.3,
        None,
        2 * 32 * 32 * 128 * 2,
        unproved="what that copy has otherwise: context, YaRN, layer_types, eos_token_id",
    ),
    "olmo-hybrid-7b": Published("allenai/Olmo-Hybrid-7B", None, 7.43, None, 2 * 8 * 30 * 128 * 2),
    "olmoe-1b-7b": Published(
        "allenai/OLMoE-1B-7B-0924",
        "huggingface.co/allenai/OLMoE-1B-7B-0924/blob/fba02cfdd0fb5b8d8b843154a3aee75c02abd4a5/config.json",
        6.92,
        (1.28, "with embeddings"),
        2 * 16 * 16 * 128 * 2,
    ),
    "opt-350m": Published(
        "facebook/opt-350m",
        "public scripts that write out the model's OPTConfig, among them EasyDeL 0.0.8's table of OPT's sizes",
        0.331,
        None,
        2 * 24 * 16 * 64 * 2,
    ),
    "phi-3-mini-4k": Published(
        "microsoft/Phi-3-mini-4k-instruct",
        "huggingface.co/GreenBitAI/Phi-3-mini-4k-instruct-layer-mix-bpw-2.2/blob/main/config.json, a copy",
        3.82,
        None,
        2 * 32 * 32 * 96 * 2,
        unproved="_name_or_path, torch_dtype and transformers_version",
    ),
    "phi-3.5-mini": Published("microsoft/Phi-3.5-mini-instruct", MLC, 3.82, None, 2 * 32 * 32 * 96 * 2),
    "phi-3.5-moe": Published(
        "microsoft/Phi-3.5-MoE-instruct",
        "huggingface.co/optimum-intel-internal-testing/phi-3.5-moe-tiny-random/blob/main/config.json and "
        "Pearush/phi_moe_22, made smaller from it",
        41.9,
        (6.6, "with embeddings"),
        2 * 32 * 8 * 128 * 2,
        unproved="the 2 x 64 factors of rope_scaling, which are ones here",
    ),
    "phi-4": Published(
        "microsoft/phi-4",
        "huggingface.co/microsoft/phi-4/blob/refs%2Fpr%2F10/config.json",
        14.66,
        None,
        2 * 40 * 10 * 128 * 2,
    ),
    "phi-4-mini": Published("microsoft/Phi-4-mini-instruct", MLC, 3.84, None, 2 * 32 * 8 * 128 * 2),
    "phi-tiny-moe": Published(
        "microsoft/Phi-tiny-MoE-instruct",
        "huggingface.co/rkumar1999/phi-tiny-moe-math-lean-sft/blob/main/config.json, a fine-tune",
        3.76,
        (1.1, UNKNOWN),
        2 * 32 * 4 * 128 * 2,
        unproved="dtype, pad_token_id and transformers_version are the fine-tune's",
    ),
    "qwen1.5-moe-a2.7b": Published(
        "Qwen/Qwen1.5-MoE-A2.7B-Chat", MLC, 14.3, (2.7, "with embeddings"), 2 * 24 * 16 * 128 * 2
    ),
    "qwen2-57b-a14b": Published(
        "Qwen/Qwen2-57B-A14B",
        "huggingface.co/zhoukz/qwen2-57b-a14b-4bit/blob/main/config.json, without its quantization_config",
        57.4,
        (14.2, "with embeddings"),
        2 * 28 * 4 * 128 * 2,
        unproved="use_sliding_window and vocab_size (not seen there), transformers_version",
    ),
    "qwen2.5-0.5b": Published(
        "Qwen/Qwen2.5-0.5B-Instruct",
        MLC,
        0.494,
        None,
        2 * 24 * 2 * 64 * 2,
        unproved="max_window_layers and transformers_version, which that copy has otherwise",
    ),
    "qwen2.5-7b": Published(
        "Qwen/Qwen2.5-7B", "github.com/citsjtu2020/LLM-Prof: sglang/Model_Config.md", 7.62, None, 2 * 28 * 4 * 128 * 2
    ),
    "qwen3-0.6b": Published(
        "Qwen/Qwen3-0.6B", f"{AICONFIGURATOR}/Qwen--Qwen3-0.6B_config.json", 0.596, None, 2 * 28 * 8 * 128 * 2
    ),
    "qwen3-30b-a3b": Published(
        "Qwen/Qwen3-30B-A3B",
        f"{AICONFIGURATOR}/Qwen--Qwen3-30B-A3B_config.json",
        30.5,
        (3.3, "with embeddings"),
        2 * 48 * 4 * 128 * 2,
    ),
    "qwen3-8b": Published(
        "Qwen/Qwen3-8B", f"{AICONFIGURATOR}/Qwen--Qwen3-8B_config.json", 8.19, None, 2 * 36 * 8 * 128 * 2
    ),
    "qwen3-next-80b-a3b": Published(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        MAXTEXT,
        79.674,
        (3.875, "with embeddings"),
        2 * 12 * 2 * 256 * 2,
        unproved="use_sliding_window is not in that copy",
    ),
    "qwen3-vl-235b-a22b": Published(
        "Qwen/Qwen3-VL-235B-A22B-Instruct",
        f"{AICONFIGURATOR}/Qwen--Qwen3-VL-235B-A22B-Instruct_config.json",
        235,
        (22, "with embeddings"),
        2 * 94 * 4 * 128 * 2,
    ),
    "qwen3-vl-2b": Published(
        "Qwen/Qwen3-VL-2B-Instruct",
        f"{AICONFIGURATOR}/Qwen--Qwen3-VL-2B-Instruct_config.json",
        1.72,
        None,
        2 * 28 * 8 * 128 * 2,
    ),
    "qwen3-vl-30b-a3b": Published(
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        f"{AICONFIGURATOR}/Qwen--Qwen3-VL-30B-A3B-Instruct_config.json",
        30.5,
        (3.3, "with embeddings"),
        2 * 48 * 4 * 128 * 2,
    ),
    "qwen3-vl-8b": Published(
        "Qwen/Qwen3-VL-8B-Instruct",
        f"{AICONFIGURATOR}/Qwen--Qwen3-VL-8B-Instruct_config.json",
        8.19,
        None,
        2 * 36 * 8 * 128 * 2,
    ),
    "qwen3.5-27b": Published(
        "Qwen/Qwen3.5-27B", f"{AICONFIGURATOR}/Qwen--Qwen3.5-27B_config.json", 26.9, None, 2 * 16 * 4 * 256 * 2
    ),
    "qwen3.5-9b": Published("Qwen/Qwen3.5-9B", None, 8.95, None, 2 * 8 * 4 * 256 * 2),
    "qwen3.6-35b-a3b": Published(
        "Qwen/Qwen3.6-35B-A3B",
        f"{AICONFIGURATOR}/nvidia--Qwen3.6-35B-A3B-NVFP4_config.json, without quantization_config",
        34.7,
        (3.0, "without"),
        2 * 10 * 2 * 256 * 2,
    ),
    "seed-oss-36b": Published(
        "ByteDance-Seed/Seed-OSS-36B-Instruct",
        "github.com/bytedance/xpu-perf: projects/xpu_oj/llm_sim/model_zoo/seed_oss/seed-oss-36b/config.json",
        36.15,
        None,
        2 * 64 * 8 * 128 * 2,
    ),
    "smollm3-3b": Published(
        "HuggingFaceTB/SmolLM3-3B",
        "a test fixture of another engine (NVIDIA tensorrt_model_connect, families/smollm3)",
        3.08,
        None,
        2 * 36 * 4 * 128 * 2,
        unproved="only the keys that it names; the file has more",
    ),
    "stablelm-2-zephyr-1.6b": Published("stabilityai/stablelm-2-zephyr-1_6b", MLC, 1.64, None, 2 * 24 * 32 * 64 * 2),
    "stablelm-zephyr-3b": Published("stabilityai/stablelm-zephyr-3b", MLC, 2.8, None, 2 * 32 * 32 * 80 * 2),
    "starcoder2-3b": Published("bigcode/starcoder2-3b", None, 3.03, None, 2 * 30 * 2 * 128 * 2),
    "starcoder2-7b": Published("bigcode/starcoder2-7b", MLC, 7.17, None, 2 * 32 * 4 * 128 * 2),
    "step-3.5-flash": Published(
        "stepfun-ai/Step-3.5-Flash",
        "tests of hipEngine and of github.com/NVIDIA-NeMo/Megatron-Bridge that assert the keys of the published file",
        196.8,
        (11, "without head"),
        2 * 45 * 8 * 128 * 2,
    ),
    "step-3.7-flash": Published(
        "stepfun-ai/Step-3.7-Flash",
        f"{AICONFIGURATOR}/stepfun-ai--Step-3.7-Flash_config.json",
        196.8,
        (11, "without head"),
        2 * 45 * 8 * 128 * 2,
    ),
    "trinity-mini": Published(
        "arcee-ai/Trinity-Mini",
        "github.com/lightseekorg/tokenspeed: test of its AfmoeConfig",
        26.1,
        (3.1, "without"),
        2 * 32 * 4 * 128 * 2,
        unproved="only the keys that it names; the file has more",
    ),
    "trinity-nano": Published(
        "arcee-ai/Trinity-Nano-Preview",
        "github.com/aws-neuron/neuronx-distributed-inference: contrib/models/Trinity/test/unit/test_config.py",
        6.12,
        (1.0, "with embeddings"),
        2 * 56 * 2 * 128 * 2,
    ),
}
UNSUPPORTED = {
    "deepseek-v4-flash": {
        "contexts compressed to one entry for 21 x 4 tokens and 20 x 128 tokens": "kernels/",
        "4 residual streams (hyper-connections)": "layers/decoder_layer.py",
        "by a hash of the token's id in 3 layers": "layers/routing.py",
        "outputs through a latent of 1024 in 8 groups": "layers/",
        "sqrtsoftplus scores": "layers/routing.py",
    },
}
"""Models of no family here: name -> what `jaxis analyze` must say is missing, and in which file that belongs."""
