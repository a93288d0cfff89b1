"""A tiny DFlash head for `eagle_checkpoints.write_target`'s model, and what transformers' generator drafts with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from tests.support.eagle_checkpoints import NUM_LAYERS, SIZE, VOCAB_SIZE

BLOCK_SIZE, MASK_TOKEN_ID, LAYER_IDS = 4, 130, (0, 2, 4)
HEADS, KV_HEADS, HEAD_DIM, FFN_SIZE = 4, 2, 32, 96

# The keys of a published head's config.json, for a model of these sizes.
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": BLOCK_SIZE,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": list(LAYER_IDS)},
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": SIZE,
    "initializer_range": 0.02,
    "intermediate_size": FFN_SIZE,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 256,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "num_key_value_heads": KV_HEADS,
    "num_target_layers": NUM_LAYERS,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 100,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}


def write_dflash_head(folder: Path, **settings: Any) -> Path:
    """Saves a random head; `settings` replace keys of `CONFIG`, and None removes them."""
    config = {key: value for key, value in (CONFIG | settings).items() if value is not None}
    size, dflash = config["hidden_size"], config["dflash_config"]
    layer_ids = dflash.get("target_layer_ids", LAYER_IDS) if isinstance(dflash, dict) else LAYER_IDS
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (size, len(layer_ids) * size),
        "hidden_norm": (size,),
        "norm": (size,),
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.input_layernorm": (size,),
            f"layers.{i}.post_attention_layernorm": (size,),
            f"layers.{i}.self_attn.q_proj": (HEADS * HEAD_DIM, size),
            f"layers.{i}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, size),
            f"layers.{i}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, size),
            f"layers.{i}.self_attn.o_proj": (size, HEADS * HEAD_DIM),
            f"layers.{i}.self_attn.q_norm": (HEAD_DIM,),
            f"layers.{i}.self_attn.k_norm": (HEAD_DIM,),
            f"layers.{i}.mlp.gate_proj": (FFN_SIZE, size),
            f"layers.{i}.mlp.up_proj": (FFN_SIZE, size),
            f"layers.{i}.mlp.down_proj": (size, FFN_SIZE),
        }
    rng = np.random.default_rng(2)
    tensors = {f"{name}.weight": _random(name, shape, rng) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_transformers_head(folder: Path, **settings: Any) -> Path:
    """Saves a random head in transformers' form; `settings` replace keys of its config."""
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    config = MuseGlimmerAssistantConfig(
        **{name: CONFIG[name] for name in (*names, "num_hidden_layers", "block_size", "max_position_embeddings")},
        **CONFIG["dflash_config"],
        rope_parameters={"rope_type": "default", "rope_theta": CONFIG["rope_theta"]},
        **settings,
    )
    model, rng = MuseGlimmerAssistantModel(config), np.random.default_rng(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_random(name, tuple(parameter.shape), rng)))
    model.save_pretrained(folder)
    return folder


def write_qwen3_target(folder: Path) -> Path:
    """Saves a random Qwen3."""
    config = transformers.Qwen3Config(
        hidden_size=SIZE,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(("norm" in name) + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    values = ("norm" in name) + 0.2 * rng.standard_normal(shape)
    # Sharp attention, and a rope of few positions: mask tokens of a block differ in nothing but their places.
    return (values * (4 if "q_norm" in name or "o_proj" in name else 1)).astype(np.float32)


class ReferenceDrafts:
    """transformers' drafts for a target.

    Its class for such heads is the one of Muse Glimmer's, which has the same layers as the authors' under a few other
    names. Windows are causal in the authors' form: then it gets masks that say so.
    """

    def __init__(self, target: Path, head: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager")
        self.model.float().eval()
        config = json.loads((head / "config.json").read_text())
        self._has_causal_windows = "dflash_config" in config and "sliding_attention" in config["layer_types"]
        if "dflash_config" not in config:
            self.assistant = MuseGlimmerAssistantModel.from_pretrained(head, attn_implementation="eager").float().eval()
            return
        names = MuseGlimmerAssistantConfig().to_dict().keys() & config.keys() - {"model_type", "architectures"}
        of_reference = MuseGlimmerAssistantConfig(
            **{name: config[name] for name in names},
            **config["dflash_config"],
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        )
        of_reference._attn_implementation = "eager"
        self.assistant = MuseGlimmerAssistantModel(of_reference).float().eval()
        renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
        state = {renamed.get(name, name): t for name, t in load_file(head / "model.safetensors").items()}
        self.assistant.load_state_dict(state)

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """The drafts behind these tokens, of all of which but the newest the target has computed the states."""
        input_ids = torch.tensor([tokens])
        outputs = self.model.model(input_ids[:, :-1], output_hidden_states=True)
        if self._has_causal_windows:
            return self._with_causal_windows(tokens[-1], outputs.hidden_states)
        mask, positions = torch.ones_like(input_ids), torch.arange(len(tokens))[None]
        candidates, _ = self._generator().get_candidates(
            input_ids, {"position_ids": positions, "attention_mask": mask}, outputs, False, 0
        )
        return candidates[0, len(tokens) :].tolist()

    def of_generation(self, tokens: Sequence[int], num_tokens: int) -> tuple[list[int], dict[int, list[int]]]:
        """The sequence that `generate` makes, and {length: the drafts that it makes behind so many tokens}."""
        found: dict[int, list[int]] = {}
        original = DFlashTokenCandidateGenerator.get_candidates

        def recorded(generator: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            candidates, logits = original(generator, input_ids, *args, **kwargs)
            if logits is not None:
                found[input_ids.shape[1]] = candidates[0, input_ids.shape[1] :].tolist()
            return candidates, logits

        try:
            DFlashTokenCandidateGenerator.get_candidates = recorded
            output = self.model.generate(
                torch.tensor([tokens]),
                assistant_model=self.assistant,
                speculation_type="dflash",
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=-1,
                pad_token_id=0,
            )
        finally:
            DFlashTokenCandidateGenerator.get_candidates = original
        return output[0].tolist(), found

    def _generator(self) -> DFlashTokenCandidateGenerator:
        return DFlashTokenCandidateGenerator(
            self.assistant,
            self.model.get_input_embeddings(),
            self.model.get_output_embeddings(),
            transformers.GenerationConfig(max_length=1 << 20, do_sample=False),
        )

    def _with_causal_windows(self, newest: int, hidden_states: Sequence[torch.Tensor]) -> list[int]:
        config, length = self.assistant.config, hidden_states[0].shape[1]
        block = torch.tensor([[newest] + [config.mask_token_id] * (config.block_size - 1)])
        positions = torch.arange(length + config.block_size)
        ages = positions[length:, None] - positions
        is_seen = (ages >= 0) & (ages < config.sliding_window)
        window = torch.zeros(is_seen.shape).masked_fill(~is_seen, -torch.inf)
        output = self.assistant(
            noise_embeds=self.model.get_input_embeddings()(block),
            context_hidden_states=torch.cat([hidden_states[i + 1] for i in config.target_layer_ids], dim=-1),
            position_ids=positions[None],
            attention_mask={"full_attention": None, "sliding_attention": window[None, None]},
        )
        logits = self.model.get_output_embeddings()(output.last_hidden_state[0, 1:])
        return logits.argmax(-1).tolist()
