"""The files of examples/kubernetes and examples/containers say what Kubernetes and jaxis understand."""

import json
import os
import re
import tomllib

import jsonschema
import pytest
import typer
import yaml

from jaxis.cli.main import app
from jaxis.config.kv_transfer import KVTransferConfig
from jaxis.engine.client.engine_client import EngineInfo, EngineStats
from jaxis.sampling_params import SamplingParams
from jaxis.server.http.api_keys import OPEN_PATHS
from jaxis.server.observability.metrics import ModelMetrics, ServerMetrics
from jaxis.server.routes import operations
from tests.support.kubernetes_schemas import SCHEMAS
from tests.support.places import REPOSITORY

FOLDER = REPOSITORY / "examples" / "kubernetes"
OBJECTS = [
    pytest.param(document, id=f"{path.stem}-{document['kind']}")
    for path in sorted(FOLDER.rglob("*.yaml"))
    if path.stem != "kustomization"
    for document in yaml.safe_load_all(path.read_text("utf-8"))
]
PATHS = {route.path for route in operations.router.routes}
SERVE = typer.main.get_command(app).commands["serve"]


def kustomized(folder):
    """The objects of a folder's kustomization: its patches only remove and replace."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    found = []
    for resource in kustomization["resources"]:
        path = folder / resource
        found += kustomized(path) if path.is_dir() else yaml.safe_load_all(path.read_text("utf-8"))
    for patch in kustomization.get("patches", []):
        [place] = [document for document in found if document["kind"] == patch["target"]["kind"]]
        for change in yaml.safe_load(patch["patch"]):
            *keys, last = [key.replace("~1", "/") for key in change["path"].split("/")[1:]]
            where = place
            for key in keys:
                where = where[int(key) if isinstance(where, list) else key]
            last = int(last) if isinstance(where, list) else last
            assert where[last] != change.get("value")
            if change["op"] == "remove":
                del where[last]
            else:
                where[last] = change["value"]
    return found


def objects(kind, name=None):
    found = [parameter.values[0] for parameter in OBJECTS if parameter.values[0]["kind"] == kind]
    return [document for document in found if name in (None, document["metadata"]["name"])]


def pods():
    """(labels, spec) of every kind of pod."""
    for document in objects("Deployment"):
        yield document["spec"]["template"]["metadata"]["labels"], document["spec"]["template"]["spec"]
    for document in objects("LeaderWorkerSet"):
        for role in ("leaderTemplate", "workerTemplate"):
            template = document["spec"]["leaderWorkerTemplate"][role]
            yield template["metadata"]["labels"], template["spec"]
    for document in objects("InferenceService"):
        yield {}, document["spec"]["predictor"]


def options(container, **variables):
    """The values of `jaxis serve`'s options, as its command line reads them."""
    command, *args = container["args"]
    assert command == "serve"
    args = [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], arg) for arg in args]
    return SERVE.make_context("serve", args).params


def group_variables(index):
    return {"LWS_LEADER_ADDRESS": "jaxis-hosts-0.jaxis-hosts", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(index)}


@pytest.fixture(scope="module")
def metrics():
    info = EngineInfo("m", None, SamplingParams(), 64, 1, 64, 10, frozenset())
    metrics = ServerMetrics()
    metrics.add(ModelMetrics("m", info, EngineStats, prefix="jaxis"))
    text = metrics.render().decode()
    return dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))


@pytest.mark.parametrize("document", OBJECTS)
def test_an_object_has_only_fields_that_its_kind_has(document):
    jsonschema.Draft202012Validator(SCHEMAS[document["kind"]]).validate(document)


@pytest.mark.parametrize(("labels", "pod"), [pytest.param(*pod, id=str(i)) for i, pod in enumerate(pods())])
def test_a_pod_runs_a_command_that_jaxis_takes_and_is_asked_where_it_answers(labels, pod):
    [container] = pod["containers"]
    given = options(container, POD_IP="10.0.0.1", **group_variables(1))
    ports = {port.get("name"): port["containerPort"] for port in container.get("ports", [])}
    probes = [container[name]["httpGet"] for name in container if name.endswith("Probe")]
    assert {probe["path"] for probe in probes} <= PATHS & OPEN_PATHS
    for probe in probes:
        assert ports.get(probe["port"], probe["port"]) == given["port"]
    waits = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    assert pod["terminationGracePeriodSeconds"] >= given["drain_timeout"] + int(waits[1])
    mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
    assert mounts == {volume["name"] for volume in pod.get("volumes", [])}


@pytest.mark.parametrize("service", objects("Service"), ids=lambda service: service["metadata"]["name"])
def test_a_service_finds_pods_that_listen(service):
    selector = service["spec"]["selector"]
    [pod] = [pod for labels, pod in pods() if selector.items() <= labels.items()]
    names = {port["name"] for port in pod["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_a_group_of_pods_is_a_group_of_hosts():
    [group] = objects("LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    for index, role in enumerate(("leaderTemplate", "workerTemplate")):
        [container] = template[role]["spec"]["containers"]
        given = options(container, **group_variables(index))
        assert (given["nnodes"], given["node_rank"]) == (template["size"], index)
        assert given["master_addr"] == "jaxis-hosts-0.jaxis-hosts"
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert given["tensor_parallel_size"] == template["size"] * gpus
        assert ("readinessProbe" in container) == (index == 0)
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_the_gateway_reads_metrics_that_are_there(metrics):
    [config_map] = objects("ConfigMap", "jaxis-endpoint-picker")
    [deployment], [pool] = objects("Deployment", "jaxis"), objects("InferencePool", "jaxis")
    config = yaml.safe_load(config_map["data"]["config.yaml"])
    jsonschema.Draft202012Validator(SCHEMAS["EndpointPickerConfig"]).validate(config)
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    [engine] = plugins["core-metrics-extractor"]["engineConfigs"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == engine.pop("name")
    assert set(engine) == {"queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "cacheInfoSpec"}
    assert {metrics.get(name) for name in engine.values()} == {"gauge"}
    references = [plugin["pluginRef"] for profile in config["schedulingProfiles"] for plugin in profile["plugins"]]
    assert set(references) <= set(plugins)
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert pool["spec"]["targetPorts"] == [{"number": options(container)["port"]}]
    [route] = objects("HTTPRoute")
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]


def test_prompts_go_from_prefill_pods_to_decode_pods(metrics):
    [config_map] = objects("ConfigMap", "jaxis-pd-endpoint-picker")
    config = yaml.safe_load(config_map["data"]["config.yaml"])
    jsonschema.Draft202012Validator(SCHEMAS["EndpointPickerConfig"]).validate(config)
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    [engine] = plugins["core-metrics-extractor"]["engineConfigs"]
    assert {metrics.get(value) for name, value in engine.items() if name != "name"} == {"gauge"}
    profiles = {profile["name"]: profile["plugins"] for profile in config["schedulingProfiles"]}
    assert {plugin["pluginRef"] for of_one in profiles.values() for plugin in of_one} <= set(plugins)
    assert plugins["disagg-profile-handler"]["deciders"]["prefill"] in plugins
    [pool], listening = objects("InferencePool", "jaxis-pd"), {}
    for role in ("prefill", "decode"):
        assert profiles[role][0]["pluginRef"] == f"{role}-filter"
        [deployment] = objects("Deployment", f"jaxis-{role}")
        template = deployment["spec"]["template"]
        labels = template["metadata"]["labels"]
        assert labels["llm-d.ai/role"] == role
        assert labels["llm-d.ai/engine-type"] == engine["name"]
        assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
        [container] = template["spec"]["containers"]
        given = options(container, POD_IP="10.0.0.1")
        transfer = KVTransferConfig.of(json.loads(given["kv_transfer_config"]))
        assert (transfer.is_producer, transfer.is_consumer) == (role == "prefill", role == "decode")
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        files = (transfer.ssl_certfile, transfer.ssl_keyfile, transfer.ssl_ca_certs)
        assert {os.path.dirname(file) for file in files} == {mounts["tls"]}
        ports = {port["containerPort"] for port in container["ports"]}
        if role == "prefill":
            assert transfer.kv_ip == "10.0.0.1"
            assert {transfer.kv_port, given["port"]} == ports
        else:
            [sidecar] = template["spec"]["initContainers"]
            assert f"--vllm-port={given['port']}" in sidecar["args"]
            ports = {port["containerPort"] for port in sidecar["ports"]}
            assert {f"--port={port}" for port in ports} <= set(sidecar["args"])
        listening[role] = ports
    [target] = pool["spec"]["targetPorts"]
    assert all(target["number"] in ports for ports in listening.values())


def test_prometheus_scrapes_the_deployment_with_its_key():
    [monitor], [deployment] = objects("PodMonitor"), objects("Deployment", "jaxis")
    template = deployment["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    [container] = template["spec"]["containers"]
    assert endpoint["path"] in PATHS
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == endpoint["authorization"]["credentials"]


def test_variants_are_the_deployment_with_other_places():
    variants = {}
    for variant in ("base", "cpu", "gateway"):
        for document in kustomized(FOLDER / variant):
            jsonschema.Draft202012Validator(SCHEMAS[document["kind"]]).validate(document)
            if document["kind"] == "Deployment":
                [variants[variant]] = document["spec"]["template"]["spec"]["containers"]
    served = {variant: options(container)["served_model_name"] for variant, container in variants.items()}
    assert served == {"base": ["qwen3-8b"], "gateway": ["qwen3-8b"], "cpu": ["qwen3-0.6b"]}
    limits = {variant: set(container["resources"]["limits"]) for variant, container in variants.items()}
    assert limits["cpu"] == limits["base"] - {"nvidia.com/gpu"}
    assert {variant for variant, container in variants.items() if "env" not in container} == {"gateway"}


def test_compose_starts_what_the_container_runs():
    folder = REPOSITORY / "examples" / "containers"
    services = yaml.safe_load((folder / "compose.yaml").read_text("utf-8"))["services"]
    for name, service in services.items():
        assert (folder / service["build"]["context"] / service["build"]["dockerfile"]).is_file(), name
        given = options({"args": service["command"].replace("${MODEL:-}", "").split()})
        assert service["ports"] == [f"127.0.0.1:{given['port']}:{given['port']}"]
    assert services["jaxis-gpu"]["build"]["args"]["EXTRAS"] in (folder / "Dockerfile").read_text("utf-8")


def test_the_container_installs_extras_that_exist_and_runs_a_command_that_jaxis_takes():
    folder = REPOSITORY / "examples" / "containers"
    text = (folder / "Dockerfile").read_text("utf-8")
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert {name for names in re.findall(r"EXTRAS=([\w,-]+)", text) for name in names.split(",")} <= set(extras)
    command = yaml.safe_load(re.search(r"^CMD (.*)$", text, re.MULTILINE)[1])
    port = options({"args": command})["port"]
    assert port == int(re.search(r"^EXPOSE (\d+)$", text, re.MULTILINE)[1])
    assert re.search(rf"http://127.0.0.1:{port}(/\w+)", text)[1] in PATHS & OPEN_PATHS
    kept = re.findall(r"^!(\S+)$", (folder / "Dockerfile.dockerignore").read_text("utf-8"), re.MULTILINE)
    assert all((REPOSITORY / name).exists() for name in kept)
