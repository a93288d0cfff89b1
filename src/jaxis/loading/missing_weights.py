from __future__ import annotations

from pathlib import Path

from jaxis.config.missing_config import ADAPTER_HINT

NOT_MODELS = ("consolidated", "adapter_model")
"""Prefixes of safetensors files that repeat or change a model's weights under other names."""
_CONVERT = "convert it with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT)"
_PICKLE = f"a pickle, which may run code when it is opened: {_CONVERT}"
_ORIGINAL = "use the original checkpoint (model*.safetensors)"
# Pattern of the file's name -> what it is, and what to do.
_KINDS = {
    "consolidated*.safetensors": "weights in Mistral's own format, without its params.json, or beside a config.json: "
    "use the checkpoint in Hugging Face format (model*.safetensors)",
    "consolidated*.pth": "weights in Meta's own format: use the checkpoint in Hugging Face format (model*.safetensors)",
    "adapter_model*": ADAPTER_HINT,
    "pytorch_model*.bin": _PICKLE,
    "*.bin": _PICKLE,
    "*.pth": _PICKLE,
    "*.pt": _PICKLE,
    "*.ckpt": _PICKLE,
    "*.gguf": "a model in one file: give the path of that file",
    "*.onnx": f"a graph for ONNX Runtime: {_ORIGINAL}",
    "onnx/*.onnx": f"a graph for ONNX Runtime: {_ORIGINAL}",
    "openvino_model.xml": f"a graph for OpenVINO: {_ORIGINAL}",
    "*.mlmodel": f"a graph for Core ML: {_ORIGINAL}",
    "*.mlpackage": f"a graph for Core ML: {_ORIGINAL}",
    "*.mlmodelc": f"a graph for Core ML: {_ORIGINAL}",
    "*.tflite": f"a graph for LiteRT: {_ORIGINAL}",
    "*.engine": f"a program for TensorRT: {_ORIGINAL}",
    "*.msgpack": f"weights in Flax's format: {_CONVERT}",
    "*.h5": f"weights in Keras' format: {_CONVERT}",
    "*.npz": f"weights in NumPy's format, as early versions of MLX had them: {_ORIGINAL}",
    "*.nemo": f"an archive of NeMo's: {_ORIGINAL}",
}


def explain_missing_weights(folder: Path) -> str:
    """Returns why a folder without `model*.safetensors` cannot be loaded, and what to do."""
    for pattern, explanation in _KINDS.items():
        if found := sorted(path.relative_to(folder).as_posix() for path in folder.glob(pattern)):
            return f"{folder} has no model*.safetensors files, and {found[0]} is not read: it is {explanation}"
    return f"{folder} has no *.safetensors files: download the weights, or give another folder"
