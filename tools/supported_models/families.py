"""The families that jaxis knows, one entry each, in the order of the page: popular ones first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A row of docs/models.md.

    Attributes:
      models: The models by name, as their makers call them.
      architectures: The entries of config.json's `architectures` that models/registry.py has a class for.
      parts: What is special about it: attention, states, routing, norms.
      formats: Quantized formats in which its makers publish it, and which load as they are.
      gguf: The values of `general.architecture` with which GGUF files of it load.
    """

    models: str
    architectures: tuple[str, ...]
    parts: str
    formats: tuple[str, ...] = ()
    gguf: tuple[str, ...] = ()


FAMILIES: tuple[Family, ...] = (
    Family(
        "Llama 2, 3, 3.1, 3.2 (text), 3.3; InternLM3; IQuest-Coder",
        ("LlamaForCausalLM",),
        "grouped-query attention, llama3 RoPE scaling",
        gguf=("llama",),
    ),
    Family(
        "Llama 4 Scout, Maverick (text)",
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        "attention in chunks of 8192, every fourth layer without RoPE and with a position-dependent attention "
        "temperature, L2 norm after RoPE, experts whose weights scale their input, a shared expert",
        gguf=("llama4",),
    ),
    Family("Mistral", ("MistralForCausalLM",), "sliding window", gguf=("llama",)),
    Family("Mixtral", ("MixtralForCausalLM",), "8 experts, 2 per token", gguf=("llama",)),
    Family(
        "Qwen1.5 MoE, Qwen2 MoE",
        ("Qwen2MoeForCausalLM",),
        "biases on queries, keys and values; a shared expert behind a gate",
    ),
    Family(
        "Qwen2, Qwen2.5; Qwen2.5-VL (text)",
        ("Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration"),
        "biases on queries, keys and values; optional window layers",
        gguf=("qwen2",),
    ),
    Family(
        "Qwen3; Qwen3-VL (text)",
        ("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"),
        "a norm on each query and key head",
        gguf=("qwen3",),
    ),
    Family(
        "Qwen3 MoE; Qwen3-VL MoE (text)",
        ("Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"),
        "128 experts, 8 per token, renormalized",
        gguf=("qwen3moe",),
    ),
    Family(
        "Qwen3-Next, Qwen3-Coder-Next",
        ("Qwen3NextForCausalLM",),
        "gated delta networks in three of four layers, whose state has a fixed size; a gate on attention's output; "
        "512 experts and a shared one behind a gate",
    ),
    Family(
        "Qwen3.5, 3.6, 3.8 (text)",
        (
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        "as Qwen3-Next, dense or with 256 experts and more",
        gguf=("qwen35", "qwen35moe"),
    ),
    Family(
        "DeepSeek V2, V2 Lite",
        ("DeepseekV2ForCausalLM",),
        "latent attention; experts in groups, softmax",
        gguf=("deepseek2",),
    ),
    Family(
        "DeepSeek V3, R1; Kimi K2, K2.5 to K2.7 (text)",
        ("DeepseekV3ForCausalLM", "Kimi_K25ForConditionalGeneration"),
        "latent attention; experts in groups, sigmoid, selection bias",
        formats=("fp8", "int4 (Kimi)"),
        gguf=("deepseek2",),
    ),
    Family(
        "DeepSeek V3.2",
        ("DeepseekV32ForCausalLM",),
        "as DeepSeek V3; an indexer selects the 2048 tokens that a token attends to",
        formats=("fp8",),
    ),
    Family(
        "GLM-5 to 5.3",
        ("GlmMoeDsaForCausalLM",),
        "as DeepSeek V3.2; from 5.2 on, three of four layers use the selection of an earlier one",
    ),
    Family(
        "GPT-OSS",
        ("GptOssForCausalLM",),
        "attention sinks, a window in every other layer, clamped gated unit, biases everywhere",
        formats=("MXFP4",),
        gguf=("gpt-oss",),
    ),
    Family("GLM-4.5, 4.6", ("Glm4MoeForCausalLM",), "partial RoPE, DeepSeek V3's routing", gguf=("glm4moe",)),
    Family("GLM-4.7 Flash", ("Glm4MoeLiteForCausalLM",), "latent attention, DeepSeek V3's routing"),
    Family(
        "MiniMax M2 to M2.7",
        ("MiniMaxM2ForCausalLM",),
        "256 experts by sigmoid with a selection bias, partial RoPE, norms on all heads together",
        formats=("fp8",),
        gguf=("minimax-m2",),
    ),
    Family(
        "Hy3", ("HYV3ForCausalLM",), "norms on heads, 192 experts by sigmoid with a selection bias, a shared expert"
    ),
    Family(
        "Hunyuan A13B", ("HunYuanMoEV1ForCausalLM",), "norms on heads after RoPE, 64 experts beside one shared block"
    ),
    Family(
        "Trinity",
        ("AfmoeForCausalLM",),
        "gated attention with a window and RoPE in three of four layers and neither in the fourth; norms before "
        "and after; sigmoid experts",
    ),
    Family(
        "Laguna",
        ("LagunaForCausalLM",),
        "attention with a softplus gate per head, windows with more heads; sigmoid experts",
    ),
    Family("Mellum 2", ("MellumForCausalLM",), "Qwen3 MoE with windows and a RoPE for each kind of layer"),
    Family("dots.llm1", ("Dots1ForCausalLM",), "norms on heads, DeepSeek V3's routing"),
    Family(
        "GLM-4 (0414)",
        ("Glm4ForCausalLM",),
        "norms before and after, interleaved partial RoPE, packed gate and up projections",
        gguf=("glm4",),
    ),
    Family(
        "Gemma 2",
        ("Gemma2ForCausalLM",),
        "norms before and after, soft caps, a window in every other layer",
        gguf=("gemma2",),
    ),
    Family(
        "Gemma 3 (text)",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        "a window in five of six layers, with its own RoPE; norms on heads",
        gguf=("gemma3",),
    ),
    Family(
        "Gemma 4 E2B, E4B, 12B, 26B-A4B, 31B (text)",
        (
            "Gemma4ForCausalLM",
            "Gemma4UnifiedForCausalLM",
            "Gemma4ForConditionalGeneration",
            "Gemma4UnifiedForConditionalGeneration",
        ),
        "a window in most layers; heads of 512 in the full ones, whose values are their keys from 12B on; the last "
        "layers of E2B and E4B attend to the keys and values of earlier ones, and every layer has embeddings of "
        "its own; 26B-A4B has 128 experts beside the dense feed-forward",
    ),
    Family(
        "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        ("Phi3ForCausalLM",),
        "packed projections, LongRoPE, partial RoPE",
        gguf=("phi3",),
    ),
    Family("Phi-3.5-MoE", ("PhimoeForCausalLM",), "experts by SparseMixer, LayerNorm, biases, LongRoPE"),
    Family(
        "OLMo 2",
        ("Olmo2ForCausalLM",),
        "norms after attention and feed-forward, on all heads together",
        gguf=("olmo2",),
    ),
    Family("OLMo 3", ("Olmo3ForCausalLM",), "as OLMo 2, with a window in three of four layers and YaRN in the fourth"),
    Family("OLMoE", ("OlmoeForCausalLM",), "64 experts, 8 per token; norms on all heads together"),
    Family(
        "Granite 3",
        ("GraniteForCausalLM",),
        "multipliers on embeddings, residuals, scores and logits",
        gguf=("granite",),
    ),
    Family("Granite 3 MoE", ("GraniteMoeForCausalLM",), "as Granite 3, with experts stored in one tensor a projection"),
    Family("StarCoder2", ("Starcoder2ForCausalLM",), "LayerNorm, plain feed-forward, biases", gguf=("starcoder2",)),
    Family(
        "Command R, R+",
        ("CohereForCausalLM",),
        "parallel attention and feed-forward, LayerNorm (R+: on heads too), interleaved RoPE, scaled logits",
        gguf=("command-r",),
    ),
    Family(
        "Command R7B, Command A",
        ("Cohere2ForCausalLM",),
        "as Command R, with a window and RoPE in three of four layers and neither in the fourth",
        gguf=("cohere2",),
    ),
    Family(
        "North Mini, Command A+",
        ("Cohere2MoeForCausalLM",),
        "as Command A, with 128 experts by sigmoid or softmax after first layers that are dense, RMS norms, shared "
        "experts averaged",
    ),
    Family(
        "SmolLM3",
        ("SmolLM3ForCausalLM",),
        "no RoPE in every fourth layer",
        gguf=("smollm3",),
    ),
    Family(
        "Seed-OSS",
        ("SeedOssForCausalLM",),
        "biases on queries, keys and values",
        gguf=("seed_oss",),
    ),
    Family(
        "EXAONE 4",
        ("Exaone4ForCausalLM",),
        "norms after attention and feed-forward, and on heads; a window and RoPE in three of four layers and "
        "neither in the fourth, or RoPE everywhere",
    ),
    Family(
        "K-EXAONE",
        ("ExaoneMoeForCausalLM",),
        "norms on heads, a window and RoPE in three of four layers and neither in the fourth, DeepSeek V3's routing",
    ),
    Family("ERNIE 4.5 (dense)", ("Ernie4_5ForCausalLM",), "interleaved RoPE"),
    Family(
        "ERNIE 4.5 MoE",
        ("Ernie4_5_MoeForCausalLM",),
        "interleaved RoPE, experts by softmax with a selection bias, shared experts",
    ),
    Family(
        "Ministral 3; Mistral Small 3.1, 3.2, Medium 3.5 (text)",
        ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
        "queries scaled by position (Ministral 3), YaRN",
        formats=("fp8",),
        gguf=("mistral3",),
    ),
    Family(
        "LFM2, LFM2.5 (dense)",
        ("Lfm2ForCausalLM",),
        "short convolutions in place of attention in two of three layers",
        gguf=("lfm2",),
    ),
    Family(
        "LFM2 MoE",
        ("Lfm2MoeForCausalLM",),
        "as LFM2, with sigmoid routing and a selection bias",
        gguf=("lfm2moe",),
    ),
    Family(
        "Nemotron-H, Nemotron Nano v2, Nemotron 3",
        ("NemotronHForCausalLM",),
        "each layer is one of Mamba2, attention without RoPE, a feed-forward block or experts; neither has a gate; "
        "experts between latent projections (Super, Ultra)",
    ),
    Family(
        "Granite 4",
        ("GraniteMoeHybridForCausalLM",),
        "Mamba2 in most layers, attention without RoPE (or attention with RoPE alone), Granite's multipliers, "
        "experts beside a dense block",
    ),
    Family(
        "Falcon-H1",
        ("FalconH1ForCausalLM",),
        "Mamba2 and attention side by side in each layer, multipliers on nearly everything",
    ),
    Family("Bamba", ("BambaForCausalLM",), "Mamba2 in most layers, partial RoPE"),
    Family("Mamba2, Codestral Mamba", ("Mamba2ForCausalLM",), "Mamba2 in every layer, no attention"),
    Family(
        "Hunyuan 0.5B to 7B",
        ("HunYuanDenseV1ForCausalLM",),
        "norms on heads after RoPE, whose base is larger by a fixed alpha",
    ),
    Family(
        "Apertus",
        ("ApertusForCausalLM",),
        "a feed-forward block without a gate, whose activation has learnt slopes (xIELU); norms on heads",
    ),
    Family(
        "Muse Glimmer (text)",
        ("MuseGlimmerForConditionalGeneration",),
        "a gate on attention's output, norms before and after, normed embeddings, a window and RoPE in three of "
        "four layers",
    ),
    Family(
        "Kimi Linear",
        ("KimiLinearForCausalLM",),
        "Kimi Delta Attention, whose state of a fixed size decays channel by channel, in three of four layers; latent "
        "attention without RoPE in the others; 256 experts by sigmoid with a selection bias",
    ),
    Family(
        "Ling 3 tiny, flash",
        ("BailingHybridForCausalLM",),
        "Kimi Delta Attention with bounded decays; latent attention with a gate per head as the last of each four or "
        "six layers; experts in groups, sigmoid, selection bias, bounded units in the last layers of flash",
    ),
    Family(
        "OLMo Hybrid",
        ("OlmoHybridForCausalLM",),
        "gated delta networks, normed before, in three of four layers; OLMo 3's attention, without RoPE, in the fourth",
    ),
    Family("MiMo 7B", ("MiMoForCausalLM",), "Qwen2, and a layer that predicts later tokens"),
    Family(
        "MiMo V2 Flash",
        ("MiMoV2FlashForCausalLM",),
        "a window with attention sinks and twice the key-value heads in five of six layers; values of 128 beside keys "
        "of 192, cached as 192; partial RoPE; 256 experts by sigmoid with a selection bias",
    ),
    Family(
        "Step 3.5 Flash; Step 3.7 Flash (text)",
        ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
        "a window with more heads and another RoPE in three of four layers, a gate on each head, 288 experts by "
        "sigmoid and a shared one, clamped in the last layers",
    ),
    Family(
        "Mistral Small 4 (text)",
        ("Mistral4ForCausalLM",),
        "latent attention, queries scaled by position, 128 experts by softmax and a shared one",
        formats=("fp8",),
    ),
    Family(
        "Gemma 3n E2B, E4B (text)",
        ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        "four hidden states a token, of which layers compute one (AltUp); residuals of a low rank (LAuReL); most gates "
        "of the first ten layers are 0; embeddings of each layer's own; the last layers attend to the keys and values "
        "of earlier ones",
    ),
    Family(
        "Jamba, Jamba 1.5, Jamba2, Jamba Reasoning",
        ("JambaForCausalLM",),
        "Mamba with norms on its time steps, B and C; attention without RoPE in one of eight layers or fewer; 16 "
        "experts in every other layer, or none",
    ),
    Family(
        "Mamba; Falcon Mamba",
        ("MambaForCausalLM", "FalconMambaForCausalLM"),
        "Mamba in every layer, no attention; Falcon Mamba has norms without weights",
    ),
    Family(
        "Granite SWA",
        ("GraniteSWAForCausalLM",),
        "as Granite 3, with attention sinks, a window in three of four layers, and a RoPE base for each layer",
    ),
)
