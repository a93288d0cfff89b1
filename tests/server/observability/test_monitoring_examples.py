"""The dashboard, the alerts and the page about them name metrics that the server has, and all of them."""

import json
import re

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.places import REPOSITORY

FOLDER = REPOSITORY / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text())
# A name that no bracket follows, as it follows a function; of a metric, with what its labels are matched with.
NAME = re.compile(r"\b((?:jaxis:|process_|http_)\w+)(?:{([^}]*)})?")
GROUPING = re.compile(r"\bby \(([^)]*)\)")


@pytest.fixture
def samples(http):
    """The labels of each sample's name at /metrics, after a request."""
    body = {"prompt": "Once", "max_tokens": 3, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels():
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions():
    yield from ((panel["title"], target["expr"]) for panel in panels() for target in panel["targets"])
    yield from ((rule["alert"], rule["expr"]) for group in ALERTS["groups"] for rule in group["rules"])


def test_every_expression_names_metrics_and_labels_that_there_are(samples):
    num_metrics = 0
    for where, expression in expressions():
        used = NAME.findall(expression)
        num_metrics += len(used)
        assert used or expression == 'up{job="jaxis"} == 0', where
        grouping = {label.strip() for labels in GROUPING.findall(expression) for label in labels.split(",")}
        for name, matchers in used:
            assert name in samples, f"{where}: there is no {name}"
            labels = samples[name] | {"instance", "job"}  # which Prometheus adds
            assert {match.split("=")[0].strip() for match in matchers.split(",") if match} <= labels, where
            assert grouping <= labels, where
        assert expression.count("(") == expression.count(")"), where
    assert num_metrics > 40


def test_rates_are_of_what_only_grows(samples, http):
    kinds = {family.name: family.type for family in text_string_to_metric_families(http.get("/metrics").text)}
    for where, expression in expressions():
        for name in re.findall(r"(?:rate|increase)\(([\w:]+)", expression):
            base = re.sub(r"_(total|bucket|sum|count)$", "", name)
            assert kinds[base] in ("counter", "histogram"), f"{where}: {name}"


def test_panels_stand_beside_each_other_and_have_names_of_their_own():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used <= variables


def test_every_metric_is_in_the_documentation(samples):
    named = set(re.findall(r"`([\w:]+\w)`", (REPOSITORY / "docs" / "operations.md").read_text()))
    ours = {name for name in samples if name.startswith(("jaxis:", "http_"))}
    bases = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in ours}
    bases = {name if name in named else f"{name}_total" for name in bases}
    assert bases <= named, sorted(bases - named)
    documented = {name for name in named if name.startswith("jaxis:")}
    # Those of API keys are there once a key has been used (tests/server/http/test_api_keys.py), those of tiers, ranks,
    # drafts and adapters where there are any (test_kv_tiers.py, test_data_rank_metrics.py,
    # tests/server/openai/test_chat.py, tests/server/lora/test_adapter_routes.py).
    conditional = ("jaxis:api_key_", "jaxis:kv_offload_", "jaxis:data_rank_", "jaxis:spec_decode_", "jaxis:lora_")
    assert {name for name in documented if not name.startswith(conditional)} <= bases | set(samples)


def test_the_server_is_where_prometheus_looks_for_it():
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    assert job["job_name"] == "jaxis"
    assert config["rule_files"] == ["alerts.yml"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]


def test_what_a_client_makes_up_becomes_no_label(serve):
    with httpx.Client(base_url=serve().url) as http:
        for path in ("/nowhere/1", "/nowhere/2", "/v1/models/other"):
            assert http.request("PROPFIND", path).status_code in (404, 405)
            assert http.get(path).status_code == 404
        families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    counts = {tuple(sample.labels.values()): sample.value for sample in families["http_requests"].samples}
    handlers, methods, _ = map(set, zip(*counts, strict=True))
    assert handlers <= {"none", "/v1/models/{model:path}", "/metrics"}
    assert methods <= {"GET", "other"}
    assert sum(counts.values()) == 6
