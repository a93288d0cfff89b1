from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxis.config.checkpoint_values import value_of_either
from jaxis.config.hf_config import HFConfig
from jaxis.config.quantization import QuantizationConfig, without_quantization
from jaxis.errors import ConfigError
from jaxis.kernels.gates import softmax
from jaxis.kernels.materialize import in_whole_vectors
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import make_parameter, named_modules
from jaxis.layers.weight_loader import default_weight_loader

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["max", "top2_sum"]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Map from a router's logits to k of X experts per token and their weights.

    An expert's score is the softmax over all experts, the sigmoid, or the square root of the softplus of its logit. The
    k best of the allowed experts are chosen, by score plus selection bias if there is one; their weights are their
    scores, without the bias. A softmax over only the chosen logits (GPT-OSS) equals `score_function="softmax"` with
    `renormalize`. Families that route otherwise override a method.

    Attributes:
      score_function: "softmax", "sigmoid" or "sqrtsoftplus".
      renormalize: True to divide a token's k weights by `divisor`.
      scaling_factor: Multiplies the weights, last.
      num_groups: Number of equally sized groups of consecutive experts.
      num_allowed_groups: Number of the best groups that a token's experts come from.
      group_score: Score of a group: its best expert ("max") or the sum of its best two ("top2_sum").
      float32_logits: True if the router multiplies in float32 regardless of the model's type.
      num_identity: Number of the last experts that have no weights and return their input.
      num_shared: Number S of experts of every token that a `SharedExpertRouter` weighs, too.

    Raises:
      ConfigError: On construction, if the values are inconsistent.
    """

    num_experts: int
    num_experts_per_token: int
    score_function: ScoreFunction = "softmax"
    renormalize: bool = False
    scaling_factor: float = 1.0
    num_groups: int = 1
    num_allowed_groups: int = 1
    group_score: GroupScore = "max"
    float32_logits: bool = False
    num_identity: int = 0
    num_shared: int = 0

    def __post_init__(self) -> None:
        for name, known in (("score_function", get_args(ScoreFunction)), ("group_score", get_args(GroupScore))):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"the router's {name}={getattr(self, name)!r} is not supported; known: {', '.join(known)}"
                )
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ConfigError(
                f"{self.num_experts} experts cannot be divided into {self.num_groups} groups of equal size"
            )
        if not 1 <= self.num_allowed_groups <= self.num_groups:
            raise ConfigError(
                f"a token's experts cannot come from {self.num_allowed_groups} of {self.num_groups} groups"
            )
        group_size = self.num_experts // self.num_groups
        if not 1 <= self.num_experts_per_token <= self.num_allowed_groups * group_size:
            raise ConfigError(
                f"a token cannot have {self.num_experts_per_token} experts of the "
                f"{self.num_allowed_groups * group_size} that it may choose from"
            )
        if self.num_groups > 1 and self.group_score == "top2_sum" and group_size < 2:
            raise ConfigError(f"groups of {group_size} expert have no best two")

    @classmethod
    def of(cls, config: HFConfig, **settings: Any) -> Self:
        """Routing with config.json's numbers of experts, under their usual keys; `settings` are other attributes."""
        return cls(
            num_experts=value_of_either(config, "num_experts", "n_routed_experts", "num_local_experts"),
            num_experts_per_token=value_of_either(config, "num_experts_per_tok", "num_experts_per_token"),
            **settings,
        )

    def bounded(self, logits: jax.Array) -> jax.Array:
        """Returns the logits [T, X] that experts are chosen by, of the router's own."""
        return logits

    def choose(self, logits: jax.Array, selection_bias: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns expert_ids i32 [T, k], best first, and expert_weights float32 [T, k], of logits float32 [T, X].

        `selection_bias` float32 [X] changes the choice only; None for none.
        """
        scores = self.scores(logits)
        if selection_bias is not None:
            choice = self.biased(logits, scores, selection_bias)
        elif self.num_groups == 1:
            # Logits order like scores, but do not tie where scores round to equal values.
            choice = logits
        else:
            choice = scores
        if self.num_allowed_groups < self.num_groups:
            choice = jnp.where(self._in_allowed_groups(choice), choice, -jnp.inf)
        _, expert_ids = jax.lax.top_k(choice, self.num_experts_per_token)
        return expert_ids, self.weights_of(scores, expert_ids)

    def scores(self, logits: jax.Array) -> jax.Array:
        """Returns the experts' scores [T, X]."""
        if self.score_function == "softmax":
            return softmax(logits)
        return in_whole_vectors(jax.nn.sigmoid if self.score_function == "sigmoid" else _sqrt_softplus, logits)

    def weights_of(self, scores: jax.Array, expert_ids: jax.Array) -> jax.Array:
        """Returns the weights [T, k] of chosen experts."""
        weights = jnp.take_along_axis(scores, expert_ids, axis=-1)
        if self.renormalize:
            weights = weights / self.divisor(weights)
        return weights * self.scaling_factor

    def biased(self, logits: jax.Array, scores: jax.Array, selection_bias: jax.Array) -> jax.Array:
        """Returns what the best are chosen of, [T, X]."""
        del logits
        return scores + selection_bias

    def divisor(self, weights: jax.Array) -> jax.Array:
        """Returns the divisor [T, 1] of a token's weights [T, k]: their sum, and guards it against zeros."""
        return weights.sum(-1, keepdims=True) + 1e-20

    def _in_allowed_groups(self, choice: jax.Array) -> jax.Array:
        """Returns bool [T, X]: True for the experts of each token's best groups."""
        groups = choice.reshape(-1, self.num_groups, self.num_experts // self.num_groups)
        best = jax.lax.top_k(groups, 1 if self.group_score == "max" else 2)[0].sum(-1)
        _, allowed = jax.lax.top_k(best, self.num_allowed_groups)
        is_allowed = (allowed[:, :, None] == jnp.arange(self.num_groups)).any(1)
        return jnp.repeat(is_allowed, groups.shape[-1], axis=-1)


def _sqrt_softplus(logits: jax.Array) -> jax.Array:
    return jnp.sqrt(jax.nn.softplus(logits))


RouterObserver = Callable[[Routing, jax.Array, jax.Array], None]
"""Function of a router's settings, its bounded logits, float32 [T, X], and the experts that it chose, i32 [T, k]."""


def _selection_bias(rngs: nnx.Rngs, routing: Routing) -> nnx.Param:
    """Creates a bias [X] that is added to scores for choosing only.

    It is float32 regardless of the model's type: differences between biases are small compared with the scores.
    """
    shape = (routing.num_experts,)
    return make_parameter(
        rngs, nnx.initializers.zeros, shape, jnp.float32, axes=(None,), weight_loader=_load_selection_bias
    )


def _load_selection_bias(param: nnx.Param, tensor: np.ndarray, shard_id: str | int | None = None) -> None:
    """Loads [X] and, as ERNIE has it, [1, X]: a `weight_loader`."""
    default_weight_loader(param, tensor.reshape(-1) if tensor.shape[:-1] == (1,) else tensor, shard_id)


class JaxRouter(JaxLinear):
    """Router: `weight` [X, E] and, in some families, a `bias` [X] on the logits.

    The weight is never quantized in memory; a quantized one in the checkpoint is dequantized. With
    `use_selection_bias`, there is an `e_score_correction_bias` [X], which is added to scores for choosing only.

    Attributes:
      observe: Function that gets logits and choices, set by `observe_routers`; None for none.
    """

    observe: RouterObserver | None = None

    def __init__(
        self,
        hidden_size: int,
        routing: Routing,
        rngs: nnx.Rngs,
        *,
        use_bias: bool = False,
        use_selection_bias: bool = False,
        dtype: DTypeLike,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__(
            hidden_size,
            routing.num_experts + routing.num_shared,
            rngs,
            use_bias=use_bias,
            dtype=dtype,
            kernel_axes=(None, "embed"),
            quant_config=without_quantization(quant_config),
            prefix=prefix,
        )
        self.routing = routing
        self.e_score_correction_bias = _selection_bias(rngs, routing) if use_selection_bias else None

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns expert_ids i32 [T, k], best first, and weights float32 [T, k] for x [T, E]."""
        logits, bias = self.logits(x), self.e_score_correction_bias
        return self._observed(logits, *self.routing.choose(logits, None if bias is None else bias[...]))

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns float32 [T, X]."""
        logits_type = jnp.float32 if self.routing.float32_logits else x.dtype
        logits = self.product(x, preferred_element_type=logits_type)
        if self.bias is not None:
            logits = logits + self.bias[...]
        return self.routing.bounded(logits.astype(jnp.float32))

    def _observed(
        self, logits: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if self.observe is not None:
            self.observe(self.routing, logits, expert_ids)
        return expert_ids, expert_weights


class SharedExpertRouter(JaxRouter):
    """Router with S more rows, of experts of every token, whose weights are parts of one sum with those of the chosen.

    `global_scale` [1] multiplies all weights.
    """

    def __init__(self, hidden_size: int, routing: Routing, rngs: nnx.Rngs, **options: Any) -> None:
        super().__init__(hidden_size, routing, rngs, **options)
        self.global_scale = make_parameter(rngs, nnx.initializers.ones, (1,), jnp.float32, axes=(None,))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns expert_ids i32 [T, k] and weights float32 [T, k + S], those of the shared experts last."""
        logits, routing, bias = self.logits(x), self.routing, self.e_score_correction_bias
        routed = logits[:, : routing.num_experts]
        chosen = self._observed(routed, *routing.choose(routed, None if bias is None else bias[...]))[0]
        shared = jnp.arange(routing.num_experts, logits.shape[1], dtype=chosen.dtype)
        weighed = jnp.concatenate([chosen, jnp.broadcast_to(shared, (len(x), routing.num_shared))], axis=1)
        return chosen, routing.weights_of(routing.scores(logits), weighed) * self.global_scale[...]


class HashRouter(JaxRouter):
    """Router to the experts that a table has for a token's id (DeepSeek V4); their weights are those of a `JaxRouter`.

    `tid2eid` i32 [V, k] is the table. Its arguments are a scope's; see `leaves.hash_router`.
    """

    def __init__(self, hidden_size: int, routing: Routing, rngs: nnx.Rngs, *, vocab_size: int, **options: Any) -> None:
        super().__init__(hidden_size, routing, rngs, **options)
        shape = (vocab_size, routing.num_experts_per_token)
        self.tid2eid = make_parameter(rngs, functools.partial(_hashed, routing), shape, jnp.int32, axes=(None, None))

    def __call__(self, x: jax.Array, token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns expert_ids i32 [T, k] and weights float32 [T, k] for x [T, E] and token_ids [T]."""
        logits = self.logits(x)
        expert_ids = self.tid2eid[...][token_ids.astype(jnp.int32)]
        return self._observed(logits, expert_ids, self.routing.weights_of(self.routing.scores(logits), expert_ids))


def _hashed(routing: Routing, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Returns k different experts of each token, in turns: an initializer."""
    del key
    return (jnp.arange(shape[0] * shape[1], dtype=dtype) % routing.num_experts).reshape(shape)


def observe_routers(module: nnx.Module, observe: RouterObserver) -> None:
    """Makes the routers below a module pass their logits and choices to a function, in this object alone.

    Inside a function that is traced by itself, the values belong to that trace, which has to return everything derived
    from them.
    """
    for _, router in named_modules(module):
        if isinstance(router, JaxRouter):
            router.observe = observe
