"""From a folder to a model: what fills it, and what is refused."""

import functools
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxis.config import LoadConfig, ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.engine.execution.cache_specs import cache_specs
from jaxis.errors import CheckpointError, ConfigError
from jaxis.layers import module, partial_weight
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule
from jaxis.loading.checkpoint import Checkpoint
from jaxis.models.common.interfaces import LoadableWithIterator, has_tied_head
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.models.registry import register_model
from jaxis.parallel.mesh import make_mesh
from jaxis.parallel.stages import Stage
from tests.support import parity
from tests.support.tiny_models import LLAMA, llama_tensors, load, write_checkpoint, write_config


def parameters(model) -> dict[str, np.ndarray]:
    return {name: np.asarray(param.get_value()) for name, param in model.named_parameters()}


def assert_loaded(model, tensors):
    loaded = parameters(model)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor, err_msg=name)


def test_every_parameter_gets_its_tensor(tmp_path):
    tensors = llama_tensors()
    assert_loaded(load(write_checkpoint(tmp_path, LLAMA, tensors)), tensors)


def test_casting_upcasts_exactly_and_rounds_to_nearest(tmp_path):
    wide = llama_tensors()
    low_precision = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in wide.items()}
    (tmp_path / "low_precision").mkdir()
    folder = write_checkpoint(tmp_path / "low_precision", LLAMA, low_precision)
    assert_loaded(load(folder), {name: tensor.astype(np.float32) for name, tensor in low_precision.items()})
    assert_loaded(load(write_checkpoint(tmp_path, LLAMA, wide), dtype=jnp.bfloat16), low_precision)


def test_a_missing_tensor_is_named(tmp_path):
    tensors = llama_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        CheckpointError, match=r"1 of the model's parameters are not in .*: model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load(write_checkpoint(tmp_path, LLAMA, tensors))


@pytest.mark.parametrize(
    "name",
    ["extra.weight", "model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "model", "lm_head"],
)
def test_an_extra_tensor_is_named(tmp_path, name):
    tensors = llama_tensors() | {name: np.zeros((3, 4), np.float32)}
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' \[3, 4\] has no parameter in LlamaForCausalLM"):
        load(write_checkpoint(tmp_path, LLAMA, tensors))


def test_a_wrong_shape_names_both_sides(tmp_path):
    tensors = llama_tensors() | {"model.layers.0.self_attn.k_proj.weight": np.zeros((8, 4), np.float32)}
    with pytest.raises(
        CheckpointError, match=r"k_proj\.weight' has shape \[8, 4\] in the checkpoint, \[4, 8\] in the model"
    ):
        load(write_checkpoint(tmp_path, LLAMA, tensors))


class TestTiedHead:
    CONFIG = LLAMA | {"tie_word_embeddings": True}

    def test_may_be_absent(self, tmp_path):
        tensors = llama_tensors()
        del tensors["lm_head.weight"]
        assert_loaded(load(write_checkpoint(tmp_path, self.CONFIG, tensors)), tensors)

    def test_may_repeat_the_embeddings(self, tmp_path):
        tensors = llama_tensors()
        head = tensors.pop("lm_head.weight")
        head[:] = tensors["model.embed_tokens.weight"]
        folder = write_checkpoint(tmp_path, self.CONFIG, tensors | {"lm_head.weight": head})
        assert_loaded(load(folder), tensors)

    @pytest.mark.parametrize("change", ["value", "shape", "dtype"])
    def test_must_not_differ_from_them(self, tmp_path, change):
        tensors = llama_tensors()
        head = tensors["model.embed_tokens.weight"].copy()
        if change == "value":
            head[-1, -1] += 1
        head = {"value": head, "shape": head[:-1], "dtype": head.astype(np.float16)}[change]
        with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            load(write_checkpoint(tmp_path, self.CONFIG, tensors | {"lm_head.weight": head}))


@pytest.mark.parametrize("is_tied", [True, False])
def test_only_a_model_with_a_head_that_is_none_is_tied(is_tied):
    config = VllmConfig(ModelConfig("it", HFConfig(LLAMA | {"tie_word_embeddings": is_tied}), max_model_len=64))
    assert has_tied_head(construct_abstractly(config)) is is_tied
    assert not has_tied_head(JaxLinear(8, 3, nnx.Rngs(0)))  # as of a model whose head has another name


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path):
    tensors = llama_tensors()
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32) for i in range(2)}
    assert_loaded(load(write_checkpoint(tmp_path, LLAMA, tensors | buffers)), tensors)


class TestConfig:
    def test_an_unknown_key_is_an_error_that_says_how_to_go_on(self, tmp_path):
        folder = write_checkpoint(tmp_path, LLAMA | {"logit_scale": 0.5}, llama_tensors())
        with pytest.raises(ConfigError, match=r"LlamaForCausalLM does not know: logit_scale.*\{'logit_scale': None\}"):
            load(folder)
        load(folder, hf_overrides={"logit_scale": None})

    def test_overrides_reach_the_model(self, tmp_path):
        tensors = llama_tensors()
        one_layer = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
        folder = write_checkpoint(tmp_path, LLAMA, one_layer)
        assert_loaded(load(folder, hf_overrides={"num_hidden_layers": 1}), one_layer)

    def test_an_unknown_architecture_names_the_known_ones(self, tmp_path):
        folder = write_checkpoint(tmp_path, LLAMA | {"architectures": ["Unheard"]}, llama_tensors())
        with pytest.raises(ConfigError, match=r"architectures=\['Unheard'\].*LlamaForCausalLM"):
            load(folder)


class TestDummyWeights:
    def test_fill_every_parameter_and_follow_the_seed(self, tmp_path):
        write_config(tmp_path, LLAMA)
        first, again, other = (parameters(load(tmp_path, load_format="dummy", seed=seed)) for seed in (1, 1, 2))
        assert {n: p.shape for n, p in first.items()} == {n: t.shape for n, t in llama_tensors().items()}
        for name, value in first.items():
            assert np.isfinite(value).all()
            np.testing.assert_array_equal(value, again[name])
            if "norm" not in name:
                assert value.std() > 0
                assert not np.array_equal(value, other[name])

    def test_are_of_the_dtype_asked_for(self, tmp_path):
        write_config(tmp_path, LLAMA)
        dtypes = {p.dtype for p in parameters(load(tmp_path, load_format="dummy", dtype=jnp.bfloat16)).values()}
        assert dtypes == {np.dtype(jnp.bfloat16)}

    def test_of_a_pipeline_stage_are_those_of_the_whole_model_and_no_others_are_made(self, tmp_path, monkeypatch):
        write_config(tmp_path, LLAMA)
        whole, made, fill = parameters(load(tmp_path, load_format="dummy")), [], module.parameter_of

        def counting(make, *args, **metadata):
            return fill(lambda key: (made.append(key), make(key))[1], *args, **metadata)

        monkeypatch.setattr(module, "parameter_of", counting)
        monkeypatch.setattr(partial_weight, "parameter_of", counting)
        stages = [parameters(load(tmp_path, load_format="dummy", stage=Stage(index, 2))) for index in range(2)]
        assert len(made) == sum(map(len, stages)) == len(whole)
        for name, value in (stages[0] | stages[1]).items():
            np.testing.assert_array_equal(value, whole[name])

    @pytest.mark.parametrize("name", ["DeepSeek V4", "Qwen3.8-Flash-Next"])
    def test_have_the_caches_of_weights_from_files(self, name):
        folder = parity.checkpoint_folder(next(family for family in parity.FAMILIES if family.name == name))
        config = ModelConfig(folder, HFConfig.from_folder(folder), dtype=jnp.float32, max_model_len=1024)
        from_files = functools.partial(construct_abstractly, VllmConfig(config))
        dummy = VllmConfig(config, load_config=LoadConfig(load_format="dummy"))
        specs = [cache_specs(make(), dummy) for make in (lambda: load_model(dummy, make_mesh()), from_files)]
        assert specs[0] == specs[1]


def test_the_checkpoint_is_closed_after_loading_and_after_a_failure(tmp_path, monkeypatch):
    closed, close = [], Checkpoint.close
    monkeypatch.setattr(Checkpoint, "close", lambda self: (closed.append(self.folder), close(self)))
    load(write_checkpoint(tmp_path, LLAMA, llama_tensors()))
    assert closed == [tmp_path]
    with pytest.raises(CheckpointError):
        load(write_checkpoint(tmp_path, LLAMA, {"extra": np.zeros(1, np.float32)}))
    assert closed == [tmp_path] * 2


class GuideModel(JaxModule, LoadableWithIterator):
    """A model as the newer guide writes it."""

    def __init__(self, vllm_config, rng: nnx.Rngs, quant_config):
        hidden_size = vllm_config.model_config.hf_config.hidden_size
        self.received = (vllm_config.quant_config, quant_config)
        self.proj = JaxLinear(hidden_size, 3, rng, use_bias=False, quant_config=quant_config, prefix="proj")
        self.table = jnp.arange(4.0)


class OlderGuideModel(nnx.Module):
    """A model as the older guide writes it: no base class of ours, a mesh, and its own search for the files."""

    def __init__(self, vllm_config, rng: nnx.Rngs, mesh: jax.sharding.Mesh):
        self.vllm_config, self.mesh = vllm_config, mesh
        self.proj = nnx.Linear(vllm_config.model_config.hf_config["hidden_size"], 3, use_bias=False, rngs=rng)

    def load_weights(self, rng):
        assert jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
        with Checkpoint(self.vllm_config.model_config.model) as checkpoint:
            self.proj.kernel.set_value(jnp.asarray(checkpoint.tensor("proj.weight").T))


class TestModelsWrittenByTheGuides:
    WEIGHT = np.arange(24, dtype=np.float32).reshape(3, 8)

    def load(self, folder, model_class, **options):
        register_model(model_class.__name__, model_class)
        config = {"architectures": [model_class.__name__], "hidden_size": 8}
        return load(write_checkpoint(folder, config, {"proj.weight": self.WEIGHT}), **options)

    def test_the_newer_one(self, tmp_path):
        model = self.load(tmp_path, GuideModel)
        np.testing.assert_array_equal(model.proj.weight[...], self.WEIGHT)

    def test_arrays_that_are_no_parameters_keep_the_constructors_values(self, tmp_path):
        np.testing.assert_array_equal(self.load(tmp_path, GuideModel).table, np.arange(4.0))

    @pytest.mark.parametrize("table", [np.arange(4.0, dtype=np.float32), (np.arange(3), {"it": np.arange(2)})])
    def test_arrays_of_numpy_become_arrays_of_the_model(self, tmp_path, table):
        class Tabular(JaxModule, LoadableWithIterator):
            def __init__(self, vllm_config, rng):
                size = vllm_config.model_config.hf_config.hidden_size
                self.proj = JaxLinear(size, 3, rng, use_bias=False, quant_config=None, prefix="proj")
                self.table = table

        loaded = jax.tree.leaves(self.load(tmp_path, Tabular).table)
        assert all(isinstance(array, jax.Array) for array in loaded)
        assert jax.tree.all(jax.tree.map(np.array_equal, loaded, jax.tree.leaves(table)))

    def test_one_that_computes_nothing_is_not_traced(self, tmp_path, monkeypatch):
        tensors = llama_tensors()
        folder = write_checkpoint(tmp_path, LLAMA, tensors)
        monkeypatch.setattr(jax, "eval_shape", lambda *_: pytest.fail("the model was traced"))
        assert_loaded(load(folder), tensors)

    def test_the_older_one(self, tmp_path):
        model = self.load(tmp_path, OlderGuideModel)
        assert isinstance(model.mesh, jax.sharding.Mesh)
        np.testing.assert_array_equal(model.proj(np.eye(8, dtype=np.float32)), self.WEIGHT.T)

    def test_an_argument_outside_the_contract_is_named(self, tmp_path):
        class Demanding(GuideModel):
            def __init__(self, vllm_config, rng, cache_size):
                super().__init__(vllm_config, rng, None)

        with pytest.raises(ConfigError, match=r"Demanding.__init__ requires the argument 'cache_size'"):
            self.load(tmp_path, Demanding)

    def test_keyword_arguments_get_everything(self, tmp_path):
        class Forwarding(GuideModel):
            def __init__(self, **kwargs):
                assert kwargs.keys() == {"vllm_config", "rng", "quant_config", "mesh"}
                super().__init__(kwargs["vllm_config"], kwargs["rng"], kwargs["quant_config"])

        np.testing.assert_array_equal(self.load(tmp_path, Forwarding).proj.weight[...], self.WEIGHT)


def test_weights_are_processed_once_a_layer_after_all_are_loaded(tmp_path):
    class DoublingMethod:
        processed = ()

        def create_weights(self, layer, rngs, dtype):
            layer.weight = nnx.Param(jnp.zeros((layer.output_size, layer.input_size), dtype))

        def process_weights_after_loading(self, layer):
            DoublingMethod.processed += (layer,)
            layer.weight.set_value(2 * layer.weight[...])

    class QuantConfig:
        def get_quant_method(self, layer, prefix):
            return DoublingMethod() if prefix == "proj" else None

        def check_all_used(self):
            pass

    class Sharing(GuideModel):
        def __init__(self, vllm_config, rng, quant_config):
            super().__init__(vllm_config, rng, quant_config)
            self.alias = self.proj

    register_model("Sharing", Sharing)
    tensors = {"proj.weight": np.ones((3, 8), np.float32)}
    folder = write_checkpoint(tmp_path, {"architectures": ["Sharing"], "hidden_size": 8}, tensors)
    model = load(folder, quant_config=QuantConfig())
    assert DoublingMethod.processed == (model.proj,)
    np.testing.assert_array_equal(model.proj.weight[...], np.full((3, 8), 2))


@pytest.mark.production_xla
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_loading_takes_little_more_memory_than_the_checkpoint(tmp_path, dtype):
    """About 420 MB, cast from bfloat16 or taken as it is."""
    script = """
    import sys, numpy as np, ml_dtypes, jax.numpy as jnp
    from pathlib import Path
    from tests.support.tiny_models import LLAMA, load, write_config
    def status(key):
        return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) * 1024
    load(Path(sys.argv[1]) / "warm", load_format="dummy")
    before = status("VmRSS")
    model = load(Path(sys.argv[2]))
    size = sum(param.get_value().nbytes for _, param in model.named_parameters())
    assert size > 350e6, size
    print((status("VmHWM") - before) / size)
    """
    config = LLAMA | {
        "vocab_size": 20_000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 5,
    }
    (tmp_path / "warm").mkdir()
    write_config(tmp_path / "warm", LLAMA)
    shapes = {
        "model.embed_tokens.weight": (20_000, 1024),
        "lm_head.weight": (20_000, 1024),
        "model.norm.weight": (1024,),
    }
    for layer in range(5):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.{norm}_layernorm.weight": (1024,) for norm in ("input", "post_attention")}
        shapes |= {f"{name}.self_attn.{p}_proj.weight": (1024, 1024) for p in "qo"}
        shapes |= {f"{name}.self_attn.{p}_proj.weight": (512, 1024) for p in "kv"}
        shapes |= {f"{name}.mlp.{p}_proj.weight": (3072, 1024) for p in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj.weight": (1024, 3072)}
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_checkpoint(folder, config, {name: np.zeros(shape, dtype) for name, shape in shapes.items()})
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path, folder],
        env={"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 1.3
