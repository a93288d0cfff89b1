"""The tree of a constructed model: its modules with their settings and parameters; equal ones of a list share a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.bringup.analyze.number_ranges import number_ranges
from jaxis.engine.execution.model_arrays import GenerativeModel
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.module import JaxModule, calls_observed, named_children, named_modules

_NUM_TOKENS = 8191  # a prime that is no model's size
_LONG = 4  # numbers
_SIZES = ("weight ", "bias ", "epsilon ")
# Attributes of modules that repeat what their parameters' shapes say, or do not change what they compute.
_UNTOLD = {
    *("aux_hidden_state_layers", "cache_entries", "checkpoint_names", "context_devices", "dtype", "input_size"),
    *("has_shared_selection", "kernel_axes", "kernel_init", "num_features", "output_size"),
    *("prediction_modules", "quant_method"),
}


@dataclass(frozen=True)
class ModuleRow:
    """A module of the tree, or several equal ones.

    Attributes:
      depth: Number of modules that contain it.
      name: Name in the module that contains it; of equal modules in a list, with their numbers: "layers.0-4,6-10".
      module: Name of its class.
      file: File of the class, below src/jaxis.
      settings: Values that it was constructed with, if they are not the usual ones, and shapes of its own parameters.
      shapes: Shapes of what it takes and returns for T tokens, as "[T, 64] -> [T, 128]"; "" if that was not asked for.
    """

    depth: int
    name: str
    module: str
    file: str
    settings: tuple[str, ...]
    shapes: str = ""

    @property
    def is_told(self) -> bool:
        """False for linear layers and norms, of which there is no more to tell than their sizes."""
        return not self.settings or any(not words.startswith(_SIZES) for words in self.settings)


def module_tree(model: JaxModule, *, in_order_of_calls: bool = False) -> tuple[ModuleRow, ...]:
    """Returns the rows of a model, each module before those that it contains.

    `in_order_of_calls` traces the model over one sequence of tokens: the modules stand in the order in which they are
    called, with `shapes`. It takes seconds.
    """
    calls = _calls(model) if in_order_of_calls else {}
    return tuple(_rows(model, "", "", 0, calls))


def _rows(module: nnx.Module, path: str, name: str, depth: int, calls: dict[str, str]) -> list[ModuleRow]:
    order = {called: number for number, called in enumerate(calls)}
    children = [(name, child) for name, child in named_children(module) if isinstance(child, nnx.Module)]
    paths = {name: f"{path}.{name}".removeprefix(".") for name, _ in children}
    children.sort(key=lambda child: order.get(paths[child[0]], len(order)))
    row = ModuleRow(
        depth,
        name,
        type(module).__name__,
        f"{type(module).__module__.removeprefix('jaxis.').replace('.', '/')}.py",
        tuple(_settings(module)),
        calls.get(path, ""),
    )
    below: dict[tuple[str, tuple[ModuleRow, ...]], list[str]] = {}
    for name_of_child, child in children:
        stem, _, number = name_of_child.rpartition(".")
        stem, number = (stem, number) if number.isdecimal() else (name_of_child, "")
        rows = tuple(_rows(child, paths[name_of_child], "", depth + 1, calls))
        below.setdefault((stem, rows), []).append(number)
    result = [row]
    for (stem, (first, *rest)), numbers in below.items():
        full_name = f"{stem}.{number_ranges(map(int, numbers))}" if numbers[0] else stem
        result += [dataclasses.replace(first, name=full_name), *rest]
    return result


def _settings(module: nnx.Module) -> Iterator[str]:
    for name, child in named_children(module):
        if not isinstance(child, nnx.Module):
            leaves = jax.tree.leaves(child.get_value())
            yield f"{name} {list(leaves[0].shape)}" if len(leaves) == 1 else f"{name} of {len(leaves)} arrays"
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in _UNTOLD and (words := _words(value)):
            yield f"{name} {words}"


def _words(value: object) -> str:
    """Describes a setting; "" for one without effect, such as None, False, a factor of 1 or an empty tuple."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int | float):
        return f"{value:g}" if value != 1.0 or isinstance(value, int) else ""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple) and value and all(isinstance(item, int | float) for item in value):
        few = ", ".join(f"{item:g}" for item in value)
        return f"({few})" if len(value) <= _LONG else f"{len(value)} numbers from {value[0]:g} to {value[-1]:g}"
    if dataclasses.is_dataclass(value):
        fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        told = [f"{field.name} {_words(item)}" for field, item in fields if item != field.default and _words(item)]
        return f"({', '.join(told)})" if told else ""
    return getattr(value, "__name__", "") if callable(value) and not isinstance(value, type | nnx.Module) else ""


def _calls(model: JaxModule) -> dict[str, str]:
    """Traces the model over a sequence; returns each called module's shapes, by its dotted name, in order of calls."""
    calls: dict[str, str] = {}

    def run(model: JaxModule, token_ids: jax.Array) -> jax.Array:
        assert isinstance(model, GenerativeModel)
        names = {id(module): name for name, module in reversed([*named_modules(model)])}

        def observe(module: JaxModule, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = names.get(id(module), "")
            if name in calls:
                return call(module, *args, **kwargs)
            calls[name] = ""
            output = call(module, *args, **kwargs)
            calls[name] = f"{_shape((args, kwargs))} -> {_shape(output)}"
            return output

        with calls_observed(observe):
            metadata = AttentionMetadata.for_whole_sequences([_NUM_TOKENS])
            return model.compute_logits(model(None, token_ids, metadata)[1])

    nnx.eval_shape(run, model, jax.ShapeDtypeStruct((_NUM_TOKENS,), jnp.int32))
    return calls


def _shape(tree: object) -> str:
    """Writes the shape of the first array of numbers, or of token ids if there is none."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    floats = [array for array in arrays if jnp.issubdtype(array.dtype, jnp.floating)]
    if not (found := floats or arrays):
        return "[]"
    return f"[{', '.join('T' if size == _NUM_TOKENS else str(size) for size in found[0].shape)}]"
