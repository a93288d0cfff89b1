"""Steps of training compiled for TPUs: what each device holds, computes and exchanges, and the bounds of time of that.

  JAX_PLATFORMS=cpu python -m tools.compiled_programs.training v5e-16 v6e-8 --models qwen3-8b --row-tokens 2048

Writes docs/compiled-trainings.json, and the table in docs/accelerators.md, which is made of it. Two layers are
compiled, with all weights trained in bfloat16 by AdamW, layers recomputed, one row a data rank. The other layers are
arithmetic on these.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxis.compilation.abstract_model import abstract_model
from jaxis.compilation.abstract_runner import target_mesh
from jaxis.compilation.compiled_program import ProgramMemory, read_program
from jaxis.compilation.hbm_traffic import hbm_traffic
from jaxis.compilation.hlo import parse_hlo
from jaxis.compilation.program_text import Collective
from jaxis.compilation.targets import Target, parse_target
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.parallel.mesh import DATA_AXIS, make_mesh
from jaxis.planning.exchanges import sent_bytes
from jaxis.training.batches import TrainingBatch
from jaxis.training.config import TrainingParams
from jaxis.training.forward_pass import ForwardPass
from jaxis.training.functional_model import values_of
from jaxis.training.objectives import CrossEntropy
from jaxis.training.optimizer import make_optimizer
from jaxis.training.scores import make_forward
from jaxis.training.sharding import Devices, Placement
from jaxis.training.step import make_step
from tests.support.places import REPOSITORY
from tests.support.published_models import read

PAGE = REPOSITORY / "docs" / "accelerators.md"
ROWS = REPOSITORY / "docs" / "compiled-trainings.json"
NUM_LAYERS = 2
BEGIN, END = "<!-- trainings -->\n", "<!-- end of trainings -->\n"
_LAYER = "layer_0"
"""Name of the first layer's instructions; those of the last run beside the exchange of the head's weights."""
_MASTERS, _GRADIENTS, _COMPUTED = 12, 4, 2  # bytes of a parameter: with moments; float32; bfloat16


@dataclass(frozen=True)
class TrainingRow:
    """A model's step of training on one target; all figures are of one device.

    Attributes:
      layers: Layers of the whole model.
      memory_bytes: Bytes that the whole model needs, by those of the compiled layers.
      overlapped, exposed: Bytes that the compiled layers send while products run, and while none does, by opcode.
      products, memory, links: Least seconds of the whole model's step.
      model_share: Part of the operations that MFU counts: without what is recomputed, and half of attention's square.
    """

    model: str
    target: str
    row_tokens: int
    tensor: int
    layers: int
    memory_bytes: int
    usable_bytes: int
    overlapped: dict[str, float]
    exposed: dict[str, float]
    products: float
    memory: float
    links: float
    exposed_links: float
    model_share: float

    @property
    def bounds(self) -> tuple[float, float]:
        """The most that MFU can be if all exchanges were overlapped, and with those that the program exposes."""
        longest = max(self.products, self.memory, self.links)
        exposed = max(self.products, self.memory, self.links - self.exposed_links) + self.exposed_links
        return self.model_share * self.products / longest, self.model_share * self.products / exposed


def compile_step(values: dict[str, Any], devices: Sequence[Any], tensor: int, row_tokens: int) -> jax.stages.Compiled:
    """Compiles a step of training of a config.json's model."""
    config = HFConfig(values, source="config.json")
    model = abstract_model(VllmConfig(ModelConfig("", config, jnp.bfloat16, row_tokens)), make_mesh())
    mesh = target_mesh(devices, len(devices) // tensor)
    shared, plain = Devices(mesh), ForwardPass(model, jnp.bfloat16)
    shapes = {name: jax.ShapeDtypeStruct(value.shape, jnp.float32) for name, value in values_of(model).items()}
    specs = shared.specs(shapes, plain.model.logical_axes)

    def placed(shape: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    def of_state(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: placed(shape, specs[name]) for name, shape in tree.items()}
        return placed(tree, PartitionSpec())

    optimizer = make_optimizer(TrainingParams(), lambda _: jnp.full((), 1e-5), plain.model.logical_axes)
    state = jax.eval_shape(optimizer.init, shapes)
    state = jax.tree.map(of_state, state, is_leaf=lambda tree: isinstance(tree, dict))

    def of_rows(*shape: int, dtype: Any = jnp.int32) -> Any:
        return placed(jax.ShapeDtypeStruct((1, shared.num_ranks, *shape), dtype), PartitionSpec(None, DATA_AXIS))

    batch: Any = TrainingBatch(
        ids=of_rows(row_tokens),
        targets=of_rows(row_tokens),
        learned=of_rows(row_tokens, dtype=jnp.bool_),
        positions=of_rows(row_tokens),
        seq_lens=of_rows(1),
        query_start_loc=of_rows(2),
        num_sequences=of_rows(),
        number=of_rows(),
    )
    key = placed(jax.eval_shape(lambda: jax.random.key(0)), PartitionSpec())
    with jax.set_mesh(mesh):
        forward = make_forward(plain.model, lambda weights, _: plain.bind(weights), recompute=True)
        placement = Placement(shared, specs, {})
        step: Any = make_step(forward, CrossEntropy(), plain.with_weights, optimizer, 1.0, placement)
        return step.lower(of_state(shapes), {}, state, batch, key).compile()


def measure(name: str, target: Target, tensor: int, row_tokens: int) -> TrainingRow:
    """Compiles a published model's step, cut to a few layers, and computes the whole model's bounds."""
    values = read(name)
    compiled = compile_step(values | {"num_hidden_layers": NUM_LAYERS}, target.devices(), tensor, row_tokens)
    program, text = read_program(compiled), compiled.as_text()
    assert text is not None
    return row_of(name, values, target, tensor, row_tokens, program.memory, program.text.collectives, text)


def row_of(
    name: str,
    values: dict[str, Any],
    target: Target,
    tensor: int,
    row_tokens: int,
    memory: ProgramMemory,
    collectives: Iterable[Collective],
    text: str,
) -> TrainingRow:
    """Computes a row from the compiled layers."""
    layers, hidden, heads = (values[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    of_layer, others = _parameters(values)
    devices, accelerator = target.num_devices, target.accelerator
    more = layers - NUM_LAYERS
    memory_bytes = memory.total + more * (
        (_MASTERS + _GRADIENTS) * of_layer // devices + _COMPUTED * row_tokens * hidden
    )
    sent = {True: dict[str, float](), False: dict[str, float]()}
    for each in collectives:
        group = len(each.group) or devices
        whole = each.nbytes * (group if each.opcode == "reduce-scatter" else 1)
        of_kind = sent[each.is_overlapped]
        of_kind[each.opcode] = of_kind.get(each.opcode, 0) + sent_bytes(each.opcode, whole, group)
    # A layer's weights are gathered twice and their gradients summed; the others' are gathered once.
    scale = (3 * layers * of_layer + 2 * others) / (3 * NUM_LAYERS * of_layer + 2 * others)
    module = parse_hlo(text)
    layer_bytes = sum(hbm_traffic(one, at, module) for at, one, _ in module.running() if _LAYER in one.op_name)
    attention = 2 * 2 * row_tokens * row_tokens * heads * (values.get("head_dim") or hidden // heads)
    head = 2 * row_tokens * values["vocab_size"] * hidden
    forward = layers * (2 * row_tokens * of_layer + attention) + head
    counted = 3 * (forward - layers * attention // 2)
    peak, bandwidth = accelerator.flops["bfloat16"] * tensor, accelerator.interconnect_bandwidth
    return TrainingRow(
        name,
        str(target),
        row_tokens,
        tensor,
        layers,
        memory_bytes,
        accelerator.usable_bytes,
        sent[True],
        sent[False],
        products=4 * forward / peak,
        memory=layers * layer_bytes / accelerator.memory_bandwidth,
        links=scale * sum(map(math.fsum, (each.values() for each in sent.values()))) / bandwidth,
        exposed_links=scale * math.fsum(sent[False].values()) / bandwidth,
        model_share=counted / (4 * forward),
    )


def _parameters(values: dict[str, Any]) -> tuple[int, int]:
    """Returns the parameters of a layer, and those outside of layers."""

    def count(layers: int) -> int:
        config = HFConfig(values | {"num_hidden_layers": layers}, source="config.json")
        model = abstract_model(VllmConfig(ModelConfig("", config, jnp.bfloat16, 64)), make_mesh())
        return sum(math.prod(value.shape) for value in values_of(model).values())

    one, two = count(1), count(2)
    return two - one, 2 * one - two


def table(rows: Sequence[TrainingRow]) -> str:
    """The rows as a table of Markdown."""
    head = ["model", "on", "row", "memory", "products", "HBM", "links", "of them exposed", "MFU at most"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        shared = f", {row.tensor} share a layer" if row.tensor > 1 else ""
        fits = "" if row.memory_bytes <= row.usable_bytes else ", **too large**"
        ideal, exposed = row.bounds
        seconds = [f"{1000 * each:.0f} ms" for each in (row.products, row.memory, row.links)]
        lines.append(
            [
                row.model,
                row.target + shared,
                str(row.row_tokens),
                f"{row.memory_bytes / 2**30:.1f} of {row.usable_bytes / 2**30:.1f} GiB{fits}",
                *seconds,
                f"{row.exposed_links / row.links:.0%}",
                f"{exposed:.0%} ({ideal:.0%})",
            ]
        )
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        "tools.compiled_programs.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help="such as v5e-16; none only writes the table")
    parser.add_argument("--models", default="qwen3-8b", help="names of configs, separated by commas")
    parser.add_argument("--row-tokens", type=int, default=4096, help="tokens of each device's row")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices that share a layer")
    args = parser.parse_args()
    known = [TrainingRow(**values) for values in json.loads(ROWS.read_text())] if ROWS.exists() else []
    rows = {(row.model, row.target, row.row_tokens, row.tensor): row for row in known}
    for target in map(parse_target, args.targets):
        for model in args.models.split(","):
            row = measure(model, target, args.tensor_parallel_size, args.row_tokens)
            rows[row.model, row.target, row.row_tokens, row.tensor] = row
            print(row, flush=True)
    ordered = [rows[key] for key in sorted(rows)]
    ROWS.write_text(json.dumps([dataclasses.asdict(row) for row in ordered], indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(ordered) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
