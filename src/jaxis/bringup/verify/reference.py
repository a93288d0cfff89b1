"""The reference: a `transformers` model in float32, and its modules' inputs and outputs.

Only this module of jaxis needs torch and transformers. It imports them when a reference is created.

A checkpoint whose weights fit in memory in float32 is loaded in float32. One that fits only in its own data type keeps
it, and each module's weights are upcast while that module runs: the values are the same, at the cost of one more
module's weights. The reference runs first and frees its memory before jaxis loads the model.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from jaxis.bringup.verify.recording import LOGITS, ModuleCall, Recording, Values, call_name
from jaxis.errors import ConfigError, JaxisError
from jaxis.loading.checkpoint import Checkpoint
from jaxis.models.registry import family_of

INSTALL = "pip install 'jaxis[verify]'"
SMALL_PARAMETERS = 10**7
MEMORY_SHARE = 0.8  # share of free memory for the reference's weights
# Keyword arguments of a call that are not activations.
_NOT_ACTIVATIONS = frozenset({"attention_mask", "position_ids", "cache_position", "input_ids"})


@dataclass(frozen=True)
class Continuation:
    """The reference's greedy continuation.

    Attributes:
      logits: float32 [N, V], logits from which each token was chosen.
    """

    token_ids: list[int]
    logits: np.ndarray


class Reference:
    """A transformers model in eval mode.

    `model` is the model, `versions` are those of the libraries that compute; `how` tells a report how the weights are
    held.
    """

    def __init__(self, model: Any, how: str) -> None:
        torch, transformers = _libraries()
        self.model, self._torch = model, torch
        # Of a model that holds a causal language model beside its tower for images, the language model is run: the
        # outer class of Llama 4 needs an image in transformers 5.24.
        inner: Any = getattr(model, "language_model", None)
        self._language_model: Any = inner if hasattr(inner, "lm_head") else model
        self._generation_config = transformers.GenerationConfig
        is_small = sum(parameter.numel() for parameter in model.parameters()) < SMALL_PARAMETERS
        # With threads, synchronizing on the products of a model this small takes many times longer than computing them.
        self._num_threads = 1 if is_small else torch.get_num_threads()
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self.how = how

    @classmethod
    def random(cls, config: Mapping[str, Any], seed: int = 0) -> Reference:
        """Makes a model of this config.json whose every parameter and saved buffer is random.

        Norm weights are around 1, so that a missing norm shows and activations keep their size. All values are exact in
        bfloat16, so that no data type changes the model. Raises ConfigError if the libraries are missing, or
        transformers does not know the architecture.
        """
        torch, _ = _libraries()
        with _one_line_errors("construct the model"):
            model = _model_class(config)[0](_config(config)).float().eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if tensor.is_floating_point():
                    center = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                    values = center + _spread(name) * torch.randn(tensor.shape, generator=generator)
                    tensor.copy_(values.bfloat16())
        return cls(model, "random weights in float32")

    @classmethod
    def from_folder(cls, folder: Path) -> Reference:
        """Loads the checkpoint's model.

        Raises:
          ConfigError: The libraries are missing, transformers does not know the architecture, or memory is short.
        """
        torch, _ = _libraries()
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model_class, transformers = _model_class(config)
        with Checkpoint(folder) as checkpoint:
            infos = [checkpoint.info(name) for name in checkpoint.names()]
        free = MEMORY_SHARE * psutil.virtual_memory().available
        wide = 4 * sum(math.prod(info.shape) for info in infos)
        stored = sum(info.nbytes for info in infos)
        options: dict[str, Any] = {}
        if (settings := _dequantizing(transformers, config)) is not None:
            options["quantization_config"], stored = settings, wide // 2
        if min(wide, stored) > free:
            raise ConfigError(
                f"the reference needs {min(wide, stored) / 2**30:.1f} GiB of memory and {free / 2**30:.1f} are free: "
                "on a larger machine save its logits with --save-golden FILE, and compare here with --golden FILE"
            )
        is_wide = wide <= free
        options["dtype"] = torch.float32 if is_wide else "auto"
        with _one_line_errors("load the model"):
            model = model_class.from_pretrained(folder, config=_config(config), attn_implementation="eager", **options)
        if not is_wide:
            _upcast_while_running(torch, model)
        return cls(
            model.eval(), "float32" if is_wide else "the checkpoint's data type, each module upcast while it runs"
        )

    def save(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Writes the weights under their published names, and `config` unchanged as config.json."""
        self.model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    @contextmanager
    def _computing(self) -> Iterator[None]:
        before = self._torch.get_num_threads()
        self._torch.set_num_threads(self._num_threads)
        try:
            with self._torch.no_grad(), _one_line_errors("run the model"):
                yield
        finally:
            self._torch.set_num_threads(before)

    def logits(self, token_ids: Sequence[int], rows: np.ndarray | None = None) -> np.ndarray:
        """Computes the logits float32 [T, V] of one sequence, or only those of the given rows."""
        kept = {} if rows is None else {"logits_to_keep": self._torch.from_numpy(rows).long()}
        with self._computing():
            result = self._language_model(self._torch.tensor([list(token_ids)]), use_cache=False, **kept)
        return result.logits[0].float().numpy()

    def see(
        self, folder: Path, image: Any, token_ids: Sequence[int], rows: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes a sequence with an image: embeddings float32 [N, E] of these rows, and logits float32 [T, V].

        The checkpoint's image processor is used as it is with Pillow. `rows` are the positions of the image's
        embeddings. Raises ConfigError if transformers has no such processor, or the model refuses its output.
        """
        torch = self._torch
        inputs = self._pixels(folder, image)
        accepted = inspect.signature(self.model.forward).parameters
        inputs = {name: value for name, value in inputs.items() if name in accepted}
        is_image = torch.zeros((1, len(token_ids)), dtype=torch.long)
        is_image[0, list(rows)] = 1
        inputs |= {name: is_image for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}
        embeddings: list[Any] = []

        def keep(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
            given: Any = kwargs.get("inputs_embeds")
            if isinstance(given, torch.Tensor) and given.shape[:2] == is_image.shape:
                embeddings.append(given[0])

        # The language model is the last that is given embeddings.
        hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in self.model.modules()]
        try:
            with self._computing():
                result = self.model(input_ids=torch.tensor([list(token_ids)]), use_cache=False, **inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return embeddings[-1][list(rows)].float().numpy(), result.logits[0].float().numpy()

    def _pixels(self, folder: Path, image: Any) -> Mapping[str, Any]:
        """Runs the checkpoint's image processor on an image, as its processor calls it."""
        _, transformers = _libraries()
        with _one_line_errors("prepare an image"):
            processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
            settings = {name: True for name in ("crop_to_patches",) if hasattr(processor, name)}
            own = folder / "processor_config.json"
            around = json.loads(own.read_text(encoding="utf-8")) if own.exists() else {}
            if (patch_size := around.get("patch_size")) and (merge := around.get("spatial_merge_size")):
                settings["patch_size"] = patch_size * merge
            return processor([image], return_tensors="pt", **settings)

    def generate(self, token_ids: Sequence[int], num_tokens: int) -> Continuation:
        """Continues a prompt greedily by `num_tokens` tokens, ignoring end-of-sequence tokens."""
        prompt = self._torch.tensor([list(token_ids)])
        # A fresh one: the checkpoint's own may ask for sampling and penalties.
        self._language_model.generation_config = self._generation_config()
        with self._computing():
            result = self._language_model.generate(
                prompt,
                attention_mask=self._torch.ones_like(prompt),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        logits = self._torch.stack([step[0] for step in result.logits]).float().numpy()
        return Continuation(result.sequences[0, len(token_ids) :].tolist(), logits)

    def record(self, token_ids: Sequence[int]) -> Recording:
        """Runs one sequence; records the calls of every module under the checkpoint's names, and last the logits [T,
        V].
        """
        calls: Recording = {}
        with self._hooks(calls):
            logits = self.logits(token_ids)
        calls[LOGITS] = ModuleCall(Values(), Values(logits), type(self._language_model))
        return calls

    @contextmanager
    def _hooks(self, calls: Recording) -> Iterator[None]:
        torch = self._torch
        inputs: dict[str, list[Values]] = {}
        handles = []

        def values(items: Sequence[Any]) -> Values:
            return Values.of([_to_numpy(item) for item in items if isinstance(item, torch.Tensor)])

        def watch(module: Any, name: str) -> None:
            def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                activations = [value for key, value in kwargs.items() if key not in _NOT_ACTIVATIONS]
                inputs.setdefault(name, []).append(values([*args, *activations]))

            def after(module: Any, _: tuple[Any, ...], result: Any) -> None:
                parts = [result] if isinstance(result, torch.Tensor) else list(_parts(result))
                call = ModuleCall(inputs[name][-1], values(parts), type(module))
                calls[call_name(name, len(inputs[name]))] = call

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))

        for name, module in self.model.named_modules():
            # BLOOM's and MPT's blocks add what they get as `residual`, which the layer does in jaxis.
            if name and "residual" not in inspect.signature(module.forward).parameters:
                watch(module, self._checkpoint_name(name))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _checkpoint_name(self, name: str) -> str:
        """Returns a module's name in the files that the model was loaded from, or would be saved in."""
        loading = importlib.import_module("transformers.core_model_loading")
        transforms = getattr(self.model, "_weight_conversions", None)  # those that a file's names needed
        if transforms is None:
            mapping = importlib.import_module("transformers.conversion_mapping")
            transforms = mapping.get_model_conversion_mapping(self.model, add_legacy=False)
            transforms = [each for each in transforms if not isinstance(each, loading.PrefixChange)]
        tensor = f"{name}.weight"
        for transform in reversed(transforms):
            if isinstance(transform, loading.WeightRenaming):
                tensor, _ = transform.reverse_transform().rename_source_key(tensor)
        return tensor.removesuffix(".weight")


def _spread(name: str) -> float:
    """Returns the standard deviation of a random parameter: as large as lets bfloat16 be told from a fault."""
    # A router's close decisions differ in bfloat16; a single expert must not dominate the result.
    if ".experts.down_proj" in name:
        return 0.05
    # Keeps probabilities as even as those of a trained model, instead of nearly all on one token.
    return 0.1 if "embed_tokens" in name or "lm_head" in name else 0.2


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Completes a config.json with the values that transformers assumes for missing keys.

    Raises ConfigError if the libraries are missing, or transformers does not know the architecture.
    """
    with _one_line_errors("read the config"):
        return _config(config).to_dict()


@contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """Reports any exception of transformers as an error of the reference, not as a fault of jaxis."""
    try:
        yield
    except JaxisError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(
            f"the reference, transformers, cannot {what}: {type(error).__name__}: {said}; compare with logits stored "
            "elsewhere (--golden FILE)"
        ) from error


def _libraries() -> tuple[Any, Any]:
    try:
        torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"the reference needs torch and transformers ({error}): {INSTALL}") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return torch, transformers


def _model_class(config: Mapping[str, Any]) -> tuple[Any, Any]:
    _, transformers = _libraries()
    architectures = list(config.get("architectures") or ())
    for name in architectures:
        family = family_of(name)
        # What other names of the family stand for is called as the reference calls it.
        names = (
            [name]
            if family is None or name not in family.architectures
            else [name, family.architectures[name].__name__]
        )
        for each in names:
            if (model_class := getattr(transformers, each, None)) is not None:
                return model_class, transformers
    raise ConfigError(
        f"transformers {transformers.__version__} has no model for architectures={architectures} of config.json, so "
        "there is no reference to verify against: compare with stored logits (--golden FILE)"
    )


def _config(config: Mapping[str, Any]) -> Any:
    """Makes the config with the architecture's own config class: transformers may not know the model_type."""
    config_class = _model_class(config)[0].config_class
    settings = {key: _decoded(value) for key, value in config.items() if key not in ("model_type", "auto_map")}
    return config_class.from_dict({**settings, "attn_implementation": "eager", "experts_implementation": "eager"})


def _decoded(value: Any) -> Any:
    """Copies a value, since transformers writes into nested objects, and decodes the infinities among them."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(each) for key, each in value.items()}
    return [_decoded(each) for each in value] if isinstance(value, list) else value


def _dequantizing(transformers: Any, config: Mapping[str, Any]) -> Any:
    """Makes the settings with which transformers dequantizes weights as it loads them, for formats that support it."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    classes = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
    return getattr(transformers, classes[method])(dequantize=True) if method in classes else None


def _upcast_while_running(torch: Any, model: Any) -> None:
    """Makes each module with its own weights compute in float32: its weights are upcast during its call."""

    def upcast(module: Any, _: Any) -> None:
        module.stored = {parameter: parameter.data for parameter in module.parameters(recurse=False)}
        for parameter, data in module.stored.items():
            parameter.data = data.float()

    def restore(module: Any, _: Any, __: Any) -> None:
        for parameter, data in module.stored.items():
            parameter.data = data
        del module.stored

    for module in model.modules():
        if any(parameter.dtype != torch.float32 for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(upcast)
            module.register_forward_hook(restore)


def _parts(result: Any) -> Iterator[Any]:
    yield from result.values() if isinstance(result, Mapping) else result if isinstance(result, tuple | list) else ()


def _to_numpy(tensor: Any) -> np.ndarray:
    """Copies one sequence's values to NumPy, without the batch dimension."""
    array = (tensor.float() if tensor.is_floating_point() else tensor).detach().numpy().copy()
    return array[0] if array.ndim > 1 and array.shape[0] == 1 else array
