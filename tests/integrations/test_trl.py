"""TRL trains with this server in the place of vLLM's: its client and its GRPO trainer, on CPU.

What is not TRL's own here: vLLM, of which TRL only needs NCCL between GPUs and the address of this host, is a stand-in
that has neither, and weights go through a folder, which `/update_weights` names.
"""

import importlib.abc
import importlib.machinery
import json
import shutil
import sys
import types

import httpx
import numpy as np
import pytest

from jaxis import LLM, SamplingParams
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.engine.setup import build_engine
from jaxis.host.progress import ProgressDisplay
from tests.server.conftest import serving
from tests.server.http.test_api_keys import write_keys

if importlib.util.find_spec("trl") is None:
    pytest.skip("trl is not installed", allow_module_level=True)

SIZES = {"max_num_seqs": 8, "max_model_len": 256, "kv_cache_memory": "32MiB", "dtype": "float32"}
PROMPTS = [list(range(5, 25)), list(range(40, 75))]


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A package `vllm` whose modules have any name that is imported from them."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__version__ = "0.27.0"
        module.__getattr__ = lambda name: type(name, (), {}) if not name.startswith("__") else None
        return module

    def exec_module(self, module):
        pass


@pytest.fixture(scope="module")
def client_class():
    """TRL's client; it sends an admin key, and sends weights through a folder."""
    finder = StandIn()
    sys.meta_path.insert(0, finder)
    from safetensors.torch import save_file
    from trl.generation.vllm_client import VLLMClient

    class FileClient(VLLMClient):
        key, root, num_updates = "", None, 0

        def _get(self, url, **more):
            self.session.headers["Authorization"] = f"Bearer {self.key}"
            return super()._get(url, **more)

        def init_communicator(self, device=0):
            self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {"backend": "file"}})

        def update_named_params(self, metadata, named_params):
            FileClient.num_updates += 1
            folder = self.root / f"update-{self.num_updates}"
            folder.mkdir()
            tensors = {name: tensor.detach().clone().contiguous() for name, tensor in named_params}
            assert [name for name, _, _ in metadata] == list(tensors)
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            info = {"path": folder.name, "version": self.num_updates}
            self._post(f"{self.base_url}/update_weights", json={"update_info": info})

    yield FileClient
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "trl")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def server(client_class, tmp_path_factory):
    client_class.root = root = tmp_path_factory.mktemp("weights")
    client_class.key = write_keys(root / "keys", trainer={"admin": True})["trainer"]
    model = saved(_original(), tmp_path_factory.mktemp("model") / "float32")
    arguments = EngineArgs(model=str(model), logprobs_mode="processed_logprobs", **SIZES)
    built = build_engine(arguments, ProgressDisplay(False))
    with serving(built, api_key_file=root / "keys", weights_root=root) as server:
        yield server
    built.engine.close()


def saved(model, folder):
    """A folder with the embedded model's files, and this model's weights."""
    shutil.copytree(EMBEDDED_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    model.save_pretrained(folder / "saved")
    for path in (folder / "saved").glob("*.safetensors"):
        shutil.move(path, folder)
    shutil.rmtree(folder / "saved")
    return folder


def changed_model():
    """The embedded model in transformers, with other weights."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    return model


def expected(folder=None):
    """Answers of an engine here to the prompts: tokens and their log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0)
    with LLM(folder, show_progress=False, logprobs_mode="processed_logprobs", **SIZES) as llm:
        outputs = [each.outputs[0] for each in llm.generate(PROMPTS, params)]
    scores = [[entry[t].logprob for entry, t in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs]
    return [o.token_ids for o in outputs], scores


def test_the_client_generates_scores_and_sends_weights(client_class, server, tmp_path):
    client = client_class(base_url=server.url)
    assert client.get_world_size() == 1
    assert client.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
    client.init_communicator()

    def answers():
        found = client.generate(PROMPTS, temperature=0.0, max_tokens=6)
        assert found["prompt_ids"] == PROMPTS
        return found["completion_ids"], [[value for [value] in scores] for scores in found["logprobs"]]

    tokens, scores = expected()
    assert answers() == (tokens, scores)
    both = [prompt + answer for prompt, answer in zip(PROMPTS, tokens, strict=True)]
    scored = client.get_sequence_logprobs(both, [*map(len, PROMPTS)], top_logprobs=4)
    raw = [[value for [value] in each] for each in scored["actual_logprobs"]]
    assert all(value <= 0 for each in raw for value in each)
    chat = client.chat([[{"role": "user", "content": "Who are you?"}]], n=2, temperature=1.0, max_tokens=4)
    assert [len(each) <= 4 for each in chat["completion_ids"]] == [True] * 2
    model = changed_model()
    client.update_model_params(model)
    client.reset_prefix_cache()
    folder = saved(model, tmp_path / "changed")
    assert answers() == expected(str(folder))
    assert answers()[0] != tokens
    headers = {"Authorization": f"Bearer {client_class.key}"}
    client.update_model_params(_original())
    assert answers() == (tokens, scores)
    assert httpx.get(f"{server.url}/weight_info", headers=headers).json() == {"weight_version": client.num_updates}


def _original():
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)


def test_grpo_trains(client_class, server, tmp_path, monkeypatch):
    """Importance ratios between TRL's trainer, torch, and the sampler here are those of rounding."""
    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    monkeypatch.setattr(vllm_generation, "VLLMClient", client_class)
    config = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        max_steps=3,
        learning_rate=1e-4,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server.url,
        gradient_checkpointing=False,
    )
    questions = ["Who are you?", "Is water wet?", "Can birds fly?"]
    rows = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": each}]} for each in questions])
    trainer = GRPOTrainer(
        _original(),
        reward_funcs=lambda completion_ids, **_: [len(set(ids)) / 8 for ids in completion_ids],
        args=config,
        train_dataset=rows,
        processing_class=transformers.AutoTokenizer.from_pretrained(EMBEDDED_MODEL),
    )
    trainer.train()
    logs = [each for each in trainer.state.log_history if "reward" in each]
    print(json.dumps(logs, indent=1))
    assert len(logs) == 3
    for each in logs:
        np.testing.assert_allclose(each["sampling/importance_sampling_ratio/min"], 1, atol=1e-4)
        np.testing.assert_allclose(each["sampling/importance_sampling_ratio/max"], 1, atol=1e-4)
    assert logs[-1]["grad_norm"] > 0
