"""What is read of a hub's repository when only headers are wanted."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save

from tests.support.hub_server import HubServer, client_environment

_CLIENT = """
import json, sys
from jaxis.config.quantization_files import read_config
from jaxis.errors import CheckpointError
from jaxis.loading.hub_headers import download_config, hub_tensor_infos
for line in sys.stdin:
    arguments = json.loads(line)
    try:
        config = read_config(download_config(**arguments).parent)
        infos = hub_tensor_infos(**arguments)
        tensors = infos and {name: [str(info.dtype), info.shape, info.nbytes] for name, info in infos.items()}
        answer = {"config": config, "tensors": tensors}
    except CheckpointError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
"""
ARRAYS = {
    "b.weight": np.zeros((3, 5), np.float32),
    "a.weight": np.zeros((200, 1000), np.float16),
    "c.weight": np.zeros(7, np.int8),
}
SHARDS = {"x-00001-of-00002.safetensors": ["b.weight", "a.weight"], "x-00002-of-00002.safetensors": ["c.weight"]}
INDEX = {"weight_map": {name: shard for shard, names in SHARDS.items() for name in names}}
CONFIG = b'{"model_type": "tiny"}'
MODELOPT = b'{"quantization": {"quant_algo": "FP8"}}'


@pytest.fixture(scope="module")
def hub():
    sharded = {shard: save({name: ARRAYS[name] for name in names}) for shard, names in SHARDS.items()}
    server = HubServer(
        {
            "org/single": {"main": {"config.json": CONFIG, "model.safetensors": save(ARRAYS), "README.md": b"x"}},
            "org/sharded": {
                "main": {"config.json": CONFIG, "model.safetensors.index.json": json.dumps(INDEX).encode(), **sharded}
            },
            "org/torch": {"main": {"config.json": CONFIG, "pytorch_model.bin": b"x"}},
            "org/modelopt": {
                "main": {"config.json": CONFIG, "hf_quant_config.json": MODELOPT, "model.safetensors": save(ARRAYS)}
            },
            "org/bare": {"main": {"README.md": b"x"}},
            "org/broken": {"main": {"config.json": CONFIG, "model.safetensors": b"\xff" * 100}},
        }
    )
    yield server
    server.close()


@pytest.fixture(scope="module")
def ask(hub, tmp_path_factory):
    process = subprocess.Popen(
        [sys.executable, "-c", _CLIENT],
        env=client_environment(tmp_path_factory.mktemp("cache"), HF_ENDPOINT=hub.url),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def ask(model, **arguments):
        process.stdin.write(json.dumps({"model": model, **arguments}) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    process.stdin.close()
    process.wait(timeout=30)
    process.stdout.close()


@pytest.mark.parametrize("model", ["org/single", "org/sharded"])
def test_config_and_headers_and_nothing_else_are_read(hub, ask, model):
    hub.requests.clear()
    answer = ask(model)
    assert answer["config"] == {"model_type": "tiny"}
    expected = {name: [str(array.dtype), list(array.shape), array.nbytes] for name, array in ARRAYS.items()}
    assert answer["tensors"] == expected
    weights = [request for request in hub.requests if request.startswith("GET") and request.endswith(".safetensors")]
    assert len(weights) == (1 if model == "org/single" else 2)
    assert all(hub.ranges[request.split()[1]].startswith("bytes=0-") for request in weights)
    assert not any("README" in request for request in hub.requests)


def test_the_file_that_describes_the_quantization_is_read_too(ask):
    expected = {"model_type": "tiny", "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    assert ask("org/modelopt")["config"] == expected


def test_a_repository_without_safetensors_has_no_headers(ask):
    assert ask("org/torch")["tensors"] is None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/nowhere", "no repository of that id"),
        ("org/bare", "has no config.json"),
        ("org/broken", "org/broken"),
    ],
)
def test_failures_are_one_line_that_names_the_repository(ask, model, message):
    error = ask(model)["error"]
    assert message in error
    assert model in error
    assert "\n" not in error


def test_without_a_network_it_is_one_line_after_one_attempt(tmp_path):
    environment = client_environment(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    process = subprocess.run(
        [sys.executable, "-c", _CLIENT],
        env=environment,
        input=json.dumps({"model": "org/single"}),
        capture_output=True,
        text=True,
        check=True,
    )
    error = json.loads(process.stdout)["error"]
    assert error.startswith("http://127.0.0.1:9 cannot be reached (")
    assert "org/single is not completely in the local cache: run again when it can" in error
    assert process.stderr == "", "no warnings of attempts"
