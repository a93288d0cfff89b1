"""The four levels of weight loading, each overriding the one before."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.layers.linear import JaxEinsum, JaxLinear
from jaxis.layers.module import JaxModule
from jaxis.layers.weight_loader import JaxAutoWeightsLoader, place_parameter
from jaxis.models.common.interfaces import LoadableWithIterator

RNGS = nnx.Rngs(0)
A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = A + 10
C = A + 20


def load(model: nnx.Module, *weights: tuple[str, np.ndarray]) -> set[str]:
    return JaxAutoWeightsLoader(model).load_weights(weights)


class Pair(JaxModule):
    def __init__(self):
        self.first = JaxLinear(3, 2, RNGS, use_bias=False)
        self.second = JaxLinear(3, 2, RNGS, use_bias=False)


class TestLevels:
    def test_the_default_copies_a_tensor_of_the_same_shape(self):
        model = Pair()
        assert load(model, ("first.weight", A), ("second.weight", B)) == {"first.weight", "second.weight"}
        np.testing.assert_array_equal(model.first.weight[...], A)
        np.testing.assert_array_equal(model.second.weight[...], B)

    def test_a_parameters_weight_loader_overrides_the_default(self):
        model = Pair()
        model.first.weight.set_metadata(
            "weight_loader", lambda param, tensor, shard_id: param.set_value(jnp.asarray(tensor).T)
        )
        load(model, ("first.weight", A.T), ("second.weight", B))
        np.testing.assert_array_equal(model.first.weight[...], A)
        np.testing.assert_array_equal(model.second.weight[...], B)

    def test_a_modules_load_weights_overrides_its_parameters_loaders(self):
        class Negated(Pair):
            def load_weights(self, weights):
                for name, tensor in weights:
                    getattr(self, name.split(".")[0]).weight.set_value(jnp.asarray(-tensor))
                    yield name

        class Model(JaxModule):
            def __init__(self):
                self.plain, self.blocks = Pair(), [Negated()]
                self.blocks[0].first.weight.set_metadata("weight_loader", None)

        model = Model()
        filled = load(model, ("plain.first.weight", A), ("blocks.0.first.weight", B), ("blocks.0.second.weight", C))
        assert filled == {"plain.first.weight", "blocks.0.first.weight", "blocks.0.second.weight"}
        np.testing.assert_array_equal(model.plain.first.weight[...], A)
        np.testing.assert_array_equal(model.blocks[0].first.weight[...], -B)
        np.testing.assert_array_equal(model.blocks[0].second.weight[...], -C)

    def test_a_models_load_weights_overrides_all(self):
        class Model(Pair, LoadableWithIterator):
            def load_weights(self, weights):
                return super().load_weights((name.replace("left", "first"), tensor) for name, tensor in weights)

        model = Model()
        assert model.load_weights([("left.weight", A)]) == {"first.weight"}
        np.testing.assert_array_equal(model.first.weight[...], A)

    def test_a_module_may_report_nothing(self):
        class Silent(Pair):
            def load_weights(self, weights):
                for _, tensor in weights:
                    self.first.weight.set_value(jnp.asarray(tensor))

        class Model(JaxModule):
            def __init__(self):
                self.block = Silent()

        model = Model()
        assert load(model, ("block.x", A)) == set()
        np.testing.assert_array_equal(model.block.first.weight[...], A)

    def test_a_tensor_that_a_module_leaves_unread_is_an_error(self):
        class Hasty(Pair):
            def load_weights(self, weights):
                next(iter(weights))
                return set()

        class Model(JaxModule):
            def __init__(self):
                self.block = Hasty()

        with pytest.raises(CheckpointError, match=r"'block.second.weight' \[2, 3\] was not read by Hasty"):
            load(Model(), ("block.first.weight", A), ("block.second.weight", B))


class TestFusedModules:
    class Fused(JaxModule):
        packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012

        def __init__(self):
            self.layers = [JaxModule()]
            self.layers[0].qkv_proj = JaxLinear(3, 6, RNGS, use_bias=False)
            self.layers[0].o_proj = JaxLinear(3, 2, RNGS, use_bias=False)
            self.layers[0].qkv_proj.weight.set_metadata("weight_loader", self.load_part)

        @staticmethod
        def load_part(param, tensor, shard_id):
            row = 2 * ["q_proj", "k_proj", "v_proj"].index(shard_id)
            param.set_value(param[...].at[row : row + 2].set(tensor))

    def test_each_part_fills_its_own_rows(self):
        model = self.Fused()
        names = ("layers.0.o_proj", "layers.0.v_proj", "layers.0.q_proj", "layers.0.k_proj")
        filled = load(model, *((f"{name}.weight", tensor) for name, tensor in zip(names, (A, C, A, B), strict=True)))
        assert filled == {"layers.0.qkv_proj.weight", "layers.0.o_proj.weight"}
        np.testing.assert_array_equal(model.layers[0].qkv_proj.weight[...], np.concatenate([A, B, C]))

    def test_a_missing_part_is_an_error(self):
        with pytest.raises(CheckpointError, match=r"has k_proj, q_proj of 'layers.0.qkv_proj.weight', but not v_proj"):
            load(self.Fused(), ("layers.0.q_proj.weight", A), ("layers.0.k_proj.weight", B))

    def test_a_part_without_a_place_is_an_error(self):
        with pytest.raises(CheckpointError, match=r"'layers.0.q_proj.bias' \[2, 3\] has no parameter in Fused"):
            load(self.Fused(), ("layers.0.q_proj.bias", A))

    def test_a_part_for_a_parameter_that_is_not_fused_is_an_error(self):
        model = self.Fused()
        model.layers[0].qkv_proj = JaxLinear(3, 6, RNGS, use_bias=False)
        with pytest.raises(CheckpointError, match=r"'layers.0.q_proj.weight' shard 'q_proj' was given for a parameter"):
            load(model, ("layers.0.q_proj.weight", A))


class TestEinsumWeights:
    """A checkpoint may hold neighbouring axes merged or split; anything else is refused."""

    @pytest.mark.parametrize("shape", [(2, 3, 4), (6, 4), (2, 12), (24,)])
    def test_neighbouring_axes_may_be_merged(self, shape):
        layer, values = JaxEinsum("te,nhe->tnh", (2, 3, 4), RNGS), np.arange(24, dtype=np.float32)
        load(layer, ("weight", values.reshape(shape)))
        np.testing.assert_array_equal(layer.weight[...], values.reshape(2, 3, 4))

    def test_neighbouring_axes_may_be_split(self):
        layer, values = JaxEinsum("te,he->th", (6, 4), RNGS), np.arange(24, dtype=np.float32)
        load(layer, ("weight", values.reshape(2, 3, 4)))
        np.testing.assert_array_equal(layer.weight[...], values.reshape(6, 4))

    @pytest.mark.parametrize("shape", [(4, 6), (3, 8), (4, 3, 2), (2, 3, 5), (2, 3), (2, 3, 4, 2)])
    def test_any_other_shape_is_refused(self, shape):
        layer = JaxEinsum("te,nhe->tnh", (2, 3, 4), RNGS)
        with pytest.raises(CheckpointError, match="in the checkpoint, "):
            load(layer, ("weight", np.zeros(shape, np.float32)))


def placed(tensor: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.asarray(place_parameter(nnx.Param(jnp.zeros(tensor.shape, dtype)), tensor))


def test_upcasting_bfloat16_keeps_every_finite_value():
    low_precision = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    low_precision = low_precision[np.isfinite(low_precision.astype(np.float32))]
    wide = placed(low_precision, np.float32)
    np.testing.assert_array_equal(wide.view(np.uint32), low_precision.view(np.uint16).astype(np.uint32) << 16)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1, 1, 7)])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_casting_is_numpys(shape, dtype):
    tensor = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * 100
    result = placed(tensor, dtype)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, tensor.astype(dtype))
