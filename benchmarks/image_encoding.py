"""How long a vision tower takes for an image, next to transformers, and how long running answers wait for it.

python benchmarks/image_encoding.py [--tower smolvlm|qwen3-vl-2b] [--side PIXELS] [--layers N] [--quantization int8]

The weights are random, in the shapes of SmolVLM-256M and of Qwen3-VL-2B; the text is small. Needs torch and
transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, models, pre_tokenizers

from jaxis import LLM, SamplingParams
from jaxis.vision.room import ImageEncoder

REPEATS, DECODES, DECODE_TOKENS = 3, 8, 96
_TEXT = {
    **{"vocab_size": 512, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 12, "head_dim": 64},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192},
}
_MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [12, 10, 10], "mrope_interleaved": True}


def main() -> None:
    """Measures, and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", choices=("smolvlm", "qwen3-vl-2b"), default="smolvlm")
    parser.add_argument("--side", type=int, default=512, help="pixels of a side of the image")
    parser.add_argument("--layers", type=int, help="of the tower, instead of all")
    parser.add_argument("--quantization", choices=("int8",), help="of the tower's weights and activations in jaxis")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, processor, placeholder = _smolvlm() if arguments.tower == "smolvlm" else _qwen3_vl()
        if arguments.layers:
            key = "num_hidden_layers" if arguments.tower == "smolvlm" else "depth"
            setattr(config.vision_config, key, arguments.layers)
        _write(folder, config, processor, placeholder)
        noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
        image = Image.fromarray(noise).resize((arguments.side, arguments.side), Image.Resampling.BICUBIC)
        sizes = {"max_model_len": 4096, "kv_cache_memory": "256MiB"}
        with LLM(
            str(folder),
            dtype="bfloat16",
            vision_quantization=arguments.quantization,
            show_progress=False,
            **sizes,
        ) as llm:
            prompt = {"prompt": placeholder, "multi_modal_data": {"image": image}}
            item = llm._tokenize(prompt, "the prompt").inputs[0]
            ours = _seconds_of_jaxis(llm, item)
            theirs = _seconds_of_torch(folder, item, arguments.tower)
            print(f"{arguments.tower}, {item.shape[0]} views of {item.shape[1]} x {item.shape[2]} pixels, ", end="")
            print(f"{arguments.quantization or 'bfloat16'}:")
            print(f"  jaxis {ours:.2f} s, transformers {theirs:.2f} s: {theirs / ours:.2f} times as fast")
            alone, beside = _gaps(llm, None), _gaps(llm, prompt)
            print(f"{DECODES} running answers, p99 of the time between steps: {1e3 * alone:.1f} ms alone, ", end="")
            print(f"{1e3 * beside:.1f} ms beside an image: {beside / alone:.1f} times")


def _smolvlm() -> tuple[Any, dict[str, Any], str]:
    config = transformers.SmolVLMConfig(
        text_config=_TEXT | {"model_type": "llama"},
        vision_config={
            **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
            **{"image_size": 512, "patch_size": 16},
        },
        image_token_id=260,
        scale_factor=4,
    )
    files = {"processor_class": "SmolVLMProcessor", "image_seq_len": 64}
    image = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, "do_image_splitting": False}
    return config, files | {"image_processor": image}, "<image>"


def _qwen3_vl() -> tuple[Any, dict[str, Any], str]:
    config = transformers.Qwen3VLConfig(
        text_config=_TEXT | {"model_type": "qwen3_vl_text", "rope_parameters": _MROPE},
        vision_config={
            **{"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16, "patch_size": 16},
            **{"out_hidden_size": 576, "deepstack_visual_indexes": []},
        },
        image_token_id=260,
    )
    image = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16}
    scale = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return config, {"processor_class": "Qwen3VLProcessor", "image_processor": image | scale}, "<|image_pad|>"


def _write(folder: Path, config: Any, processor: dict[str, Any], placeholder: str) -> None:
    """A checkpoint with random weights, and a tokenizer of bytes."""
    special = ("<s>", "</s>", "<fake_token_around_image>", "<global-img>", placeholder)
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def _encoder(llm: LLM) -> ImageEncoder:
    encoder = llm.engine.runner.inputs
    assert isinstance(encoder, ImageEncoder)
    return encoder


def _seconds_of_jaxis(llm: LLM, item: Any) -> float:
    encoder, programs, seconds = _encoder(llm), llm.engine.runner.programs, []
    for _ in range(REPEATS + 1):  # the first compiles
        encoder.hold([item])
        started = time.perf_counter()
        encoder.rows(item, programs)
        seconds.append(time.perf_counter() - started)
        encoder.let_go([item])
        encoder._unused.clear()
    return min(seconds[1:])


def _seconds_of_torch(folder: Path, item: Any, tower: str) -> float:
    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
    views = np.frombuffer(item.data, np.uint8).reshape(item.shape).transpose(0, 3, 1, 2)
    pixels = torch.tensor((views / 255 - 0.5) / 0.5, dtype=torch.bfloat16)
    inputs = {"pixel_values": pixels[None]}
    if tower == "qwen3-vl-2b":
        rows, columns = item.shape[1] // 16, item.shape[2] // 16
        inputs = {
            "pixel_values": torch.randn(rows * columns, 3 * 2 * 16 * 16, dtype=torch.bfloat16),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
        }
    seconds = []
    with torch.no_grad():
        for _ in range(REPEATS + 1):
            started = time.perf_counter()
            model.model.get_image_features(**inputs)
            seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def _gaps(llm: LLM, prompt: Any) -> float:
    """The 99th percentile of seconds from a step that gave running answers a token to the next, for each answer."""
    params = SamplingParams(temperature=0, max_tokens=DECODE_TOKENS, ignore_eos=True)
    gaps: list[float] = []
    for measured in (False, True):  # the first compiles
        _encoder(llm)._unused.clear()
        llm.engine.reset_prefix_cache()
        prompts = [llm._tokenize([10 + i, 20, 30], "a prompt") for i in range(DECODES)]
        # A server does this beside the engine.
        with_image = None if prompt is None else llm._tokenize(prompt, "a prompt")
        queued: list[Any] = []
        llm._add(queued, prompts, [params] * DECODES, None, [None] * DECODES)
        lengths, last = [0] * DECODES, [0.0] * DECODES
        has_image = with_image is None
        while not all(request.finished for request in queued[:DECODES]):
            llm._step()
            now = time.perf_counter()
            for i, request in enumerate(queued[:DECODES]):
                length = len(request.completions[0].sequence.output_token_ids)
                if length > lengths[i]:
                    if measured and lengths[i]:
                        gaps.append((now - last[i]) / (length - lengths[i]))
                    lengths[i], last[i] = length, now
            if with_image is not None and not has_image and min(lengths) > DECODE_TOKENS // 4:
                has_image = True
                llm._add(queued, [with_image], [params], None, [None])
        llm._abort(queued)
    return float(np.percentile(gaps, 99))


if __name__ == "__main__":
    main()
