"""Trains the embedded model from nothing: corpus, tokenizer, training, evaluation and export, in one run on a CPU.

    python examples/train_tiny.py --output src/jaxis/assets/tiny

The model is jaxis's own Qwen3 class, run over whole sequences without a KV cache; gradients flow through it as through
any other function. A run that was stopped goes on from its last checkpoint. The same seed gives the same corpus,
tokenizer and batches; the weights agree up to the rounding of the machine.
"""

import argparse
import functools
import itertools
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.flax import save_file
from tiny.batches import batches
from tiny.corpus import write_evaluation
from tiny.tokenizer import END_OF_TEXT, IM_END, VOCAB_SIZE, render, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.models.model_loader import construct_model, load_model
from jaxis.models.qwen3 import Qwen3ForCausalLM
from jaxis.parallel.mesh import make_mesh

ROOT = Path(__file__).resolve().parent.parent
EVALUATION = ROOT / "tests" / "data" / "tiny_eval.jsonl"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "dtype": "bfloat16",
}

Weights = dict[str, jax.Array]
LogitsFunction = Callable[[Weights, jax.Array], jax.Array]


def build_model(seed: int) -> tuple[Weights, LogitsFunction]:
    """A freshly initialised model as its weights, by checkpoint name, and a function of them and ids [N, L]."""
    config = VllmConfig(ModelConfig("tiny", HFConfig(CONFIG), dtype=jnp.float32, seed=seed))
    model = construct_model(Qwen3ForCausalLM, config)
    weights = {name: param.get_value() for name, param in model.named_parameters()}
    # What is added to the residual stream starts smaller, so that its size does not grow with depth (GPT-2).
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weight / (2 * CONFIG["num_hidden_layers"]) ** 0.5
    return weights, logits_function(model)


def logits_function(model: nnx.Module) -> LogitsFunction:
    """The model as a pure function: (weights, ids i32 [N, L]) -> float32 logits [N, L, V]."""
    graph, state = nnx.split(model)
    parameters = list(model.named_parameters())
    leaves, treedef = jax.tree.flatten(state)
    order = [next(name for name, param in parameters if param.get_value() is leaf) for leaf in leaves]

    def logits(weights: Weights, ids: jax.Array) -> jax.Array:
        bound = nnx.merge(graph, jax.tree.unflatten(treedef, [weights[name] for name in order]))
        metadata = AttentionMetadata.for_whole_sequences([ids.shape[1]])
        hidden = jax.vmap(lambda row: bound(None, row, metadata)[1])(ids)
        return bound.compute_logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*ids.shape, -1)

    return logits


def make_optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Muon (arXiv:2502.16982) for the layers' matrices, Adam for embeddings and norms.

    The rate warms up over 60 steps, drops to three eighths after 30% of the steps, and falls linearly to 0 over the
    second half.
    """
    drop, fall = int(steps * 0.3), steps // 2
    low = learning_rate * 3 / 8
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, learning_rate, 60),
            optax.constant_schedule(learning_rate),
            optax.constant_schedule(low),
            optax.linear_schedule(low, 0.0, steps - fall),
        ],
        [60, drop, fall],
    )

    def matrices(weights: Weights) -> dict[str, optax.contrib.MuonDimensionNumbers | None]:
        # Stored as [out, in].
        numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
        return {name: numbers if name.endswith("_proj.weight") else None for name in weights}

    muon = optax.contrib.muon(schedule, adam_b2=0.98, consistent_rms=0.2, muon_weight_dimension_numbers=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def make_train_step(logits_of: LogitsFunction, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def loss(weights: Weights, ids: jax.Array, token_weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = logits_of(weights, ids)[:, :-1]
        targets, token_weights = ids[:, 1:], token_weights[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        answers = token_weights == 1.0
        return jnp.sum(losses * token_weights) / jnp.sum(token_weights), jnp.sum(losses * answers) / jnp.sum(answers)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(
        weights: Weights, state: optax.OptState, ids: jax.Array, token_weights: jax.Array
    ) -> tuple[Weights, optax.OptState, jax.Array]:
        """Returns the new weights and optimizer state, and the mean loss on the assistant's tokens, in nats."""
        (_, answer_loss), gradients = jax.value_and_grad(loss, has_aux=True)(weights, ids, token_weights)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, answer_loss

    return train_step


class Evaluation:
    """Exact match on the held-out questions.

    An answer is right when, at each of its tokens, the right one has the highest logit given the right ones before it.
    That is when greedy decoding writes exactly this answer and then ends its turn, but takes one forward pass.
    """

    def __init__(self, tokenizer: Tokenizer, path: Path) -> None:
        self.rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        self._by_length: dict[int, list[tuple[int, list[int], int]]] = defaultdict(list)
        for index, row in enumerate(self.rows):
            prompt = tokenizer.encode(render(row["messages"], row.get("tools"), add_generation_prompt=True)).ids
            answer = tokenizer.encode(row["answer"] + IM_END).ids
            length = next(length for length in (64, 128, 256, 512) if len(prompt) + len(answer) <= length)
            self._by_length[length].append((index, prompt + answer, len(prompt)))

    def right(self, logits_of: LogitsFunction, weights: Weights) -> np.ndarray:
        """bool [rows]: which answers are right word for word."""
        predict = jax.jit(lambda weights, ids: jnp.argmax(logits_of(weights, ids), axis=-1))
        right = np.zeros(len(self.rows), bool)
        for length, items in self._by_length.items():
            for start in range(0, len(items), rows := 8192 // length):
                group = items[start : start + rows]
                ids = np.zeros((rows, length), np.int32)
                for row, (_, tokens, _) in enumerate(group):
                    ids[row, : len(tokens)] = tokens
                predicted = np.asarray(predict(weights, ids))
                for row, (index, tokens, answer) in enumerate(group):
                    right[index] = np.array_equal(predicted[row, answer - 1 : len(tokens) - 1], tokens[answer:])
        return right

    def by_category(self, right: np.ndarray) -> dict[str, float]:
        outcomes: dict[str, list[bool]] = defaultdict(list)
        for row, is_right in zip(self.rows, right, strict=True):
            outcomes[row["category"]].append(bool(is_right))
        return {category: float(np.mean(values)) for category, values in outcomes.items()}


def save_checkpoint(path: Path, step: int, weights: Weights, state: optax.OptState) -> None:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((weights, state))]
    unfinished = path.with_suffix(".tmp.npz")
    np.savez(unfinished, step, *leaves)
    unfinished.rename(path)


def load_checkpoint(path: Path, weights: Weights, state: optax.OptState) -> tuple[int, Weights, optax.OptState]:
    treedef = jax.tree.structure((weights, state))
    with np.load(path) as file:
        arrays = [jnp.asarray(file[f"arr_{i}"]) for i in range(len(file.files))]
    return int(arrays[0]), *jax.tree.unflatten(treedef, arrays[1:])


def export(folder: Path, weights: Weights, tokenizer: Tokenizer) -> None:
    """Writes the model in the Hugging Face format, its weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    end_of_text, im_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(IM_END)
    tokens = {"bos_token_id": None, "eos_token_id": im_end, "pad_token_id": end_of_text}
    generation = {"do_sample": False, "eos_token_id": [im_end, end_of_text], "pad_token_id": end_of_text}
    save_file({n: w.astype(jnp.bfloat16) for n, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    for name, content in {"config.json": CONFIG | tokens, "generation_config.json": generation}.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder)


def evaluate_export(folder: Path, evaluation: Evaluation, dtype: Any) -> np.ndarray:
    """Which answers the exported model gets right, loaded as any checkpoint is and computing in `dtype`."""
    config = VllmConfig(ModelConfig(str(folder), HFConfig.from_folder(folder), dtype=dtype))
    model = load_model(config, make_mesh())
    weights = {name: param.get_value() for name, param in model.named_parameters()}
    return evaluation.right(logits_function(model), weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens a step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="peak (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=ROOT / "tiny-run", help="folder of checkpoints")
    parser.add_argument("--output", type=Path, required=True, help="folder of the finished model")
    parser.add_argument("--evaluate-every", type=int, default=100, help="steps; also saves (default: %(default)s)")
    arguments = parser.parse_args()

    arguments.work.mkdir(parents=True, exist_ok=True)
    vocabulary = arguments.output / "tokenizer.json"
    # Token ids stay what they are between versions of the model.
    tokenizer = Tokenizer.from_file(str(vocabulary)) if vocabulary.exists() else train_tokenizer(arguments.seed)
    write_evaluation(EVALUATION)
    evaluation = Evaluation(tokenizer, EVALUATION)
    weights, logits_of = build_model(arguments.seed)
    optimizer = make_optimizer(arguments.learning_rate, arguments.steps)
    state, start = optimizer.init(weights), 0
    checkpoint = arguments.work / "checkpoint.npz"
    if checkpoint.exists():
        start, weights, state = load_checkpoint(checkpoint, weights, state)
    train_step = make_train_step(logits_of, optimizer)
    print(f"{sum(w.size for w in weights.values()) / 1e6:.2f} M parameters, from step {start}", flush=True)

    stream = batches(tokenizer, arguments.seed + 1, tokens_per_batch=arguments.batch_tokens)
    began, tokens, losses = time.monotonic(), 0, []
    for step, batch in enumerate(itertools.islice(stream, start, arguments.steps), start + 1):
        weights, state, loss = train_step(weights, state, batch.ids, batch.weights)
        losses.append(float(loss))
        tokens += batch.ids.size
        if step % 50 == 0:
            seconds = time.monotonic() - began
            print(
                f"step {step} loss {np.mean(losses[-50:]):.3f} {tokens / seconds:.0f} tokens/s {seconds:.0f} s",
                flush=True,
            )
        if step % arguments.evaluate_every == 0 or step == arguments.steps:
            save_checkpoint(checkpoint, step, weights, state)
            right = evaluation.right(logits_of, weights)
            worst = sorted(evaluation.by_category(right).items(), key=lambda item: item[1])[:8]
            shown = ", ".join(f"{category} {share:.0%}" for category, share in worst)
            print(f"step {step} held-out exact match {right.mean():.1%}; lowest: {shown}", flush=True)

    export(arguments.work / "export", weights, tokenizer)
    for dtype in (jnp.float32, jnp.bfloat16):
        right = evaluate_export(arguments.work / "export", evaluation, dtype)
        print(f"exported weights, computing in {dtype.__name__}: exact match {right.mean():.2%}", flush=True)
    shutil.copytree(arguments.work / "export", arguments.output, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
