"""Data sets of a Hub on this machine: which files are downloaded and read, and what each failure says."""

import io
import json
import subprocess
import sys

import pyarrow
import pytest
from pyarrow import parquet

from tests.support.hub_server import HubServer, client_environment

_READ = """
import json, sys
from jaxis.errors import ConfigError
from jaxis.training.config.data import DatasetParams
from jaxis.training.rows import read_rows
for line in sys.stdin:
    try:
        rows, digests = read_rows(DatasetParams.of(json.loads(line)), 0)
        print(json.dumps([row.content.completion for row in rows]))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


def table(*texts):
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist([{"text": text} for text in texts]), sink)
    return sink.getvalue()


CARD = b"""---
configs:
- config_name: en
  default: true
  data_files:
  - split: train
    path: en/a-*
  - {split: test, path: [en/b.jsonl]}
- config_name: de
  data_files: de/*.csv
---
"""
SHARDS = {f"data/train-0000{i}-of-00002.parquet": table(text) for i, text in enumerate("ab")}
CASES = [
    ({"dataset_name": "org/shards"}, ["a", "b"]),
    ({"dataset_name": "org/shards", "split": "train_sft"}, ["c"]),
    ({"dataset_name": "org/card"}, ["e", "f"]),
    ({"dataset_name": "org/card", "split": "test"}, ["g"]),
    ({"dataset_name": "org/card", "subset": "de"}, ["h"]),
    ({"dataset_name": "org/named", "split": "validation"}, ["j"]),
    ({"dataset_name": "org/one"}, ["k"]),
    ({"dataset_name": "org/none"}, "no repository of that id"),
    ({"dataset_name": "org/shards", "split": "test"}, "has no split 'test'; it has train, train_sft"),
    ({"dataset_name": "org/card", "subset": "fr"}, "has no subset 'fr'; it has en, de"),
    ({"dataset_name": "org/one", "subset": "fr"}, "has no subset 'fr'"),
]


def read(cases, tmp_path, **environment):
    process = subprocess.run(
        [sys.executable, "-c", _READ],
        env=client_environment(tmp_path, **environment),
        input="".join(json.dumps(case) + "\n" for case in cases),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.fixture
def hub():
    sets = {
        "org/shards": {**SHARDS, "data/train_sft-00000-of-00001.parquet": table("c"), "x.py": b""},
        "org/card": {
            **{"README.md": CARD, "en/a-0.parquet": table("e"), "en/a-1.jsonl": b'{"text": "f"}'},
            **{"en/b.jsonl": b'{"text": "g"}', "de/1.csv": b"text\nh\n"},
        },
        "org/named": {"train.csv": b"text\ni\n", "dev.csv": b"text\nj\n"},
        "org/one": {"rows.jsonl": b'{"text": "k"}'},
    }
    server = HubServer({name: {"main": files} for name, files in sets.items()})
    yield server
    server.close()


def test_the_files_of_a_split_are_read_and_no_others_downloaded(hub, tmp_path):
    found = read([case for case, _ in CASES], tmp_path, HF_ENDPOINT=hub.url)
    for (case, expected), answer in zip(CASES, found, strict=True):
        if isinstance(expected, list):
            assert answer == expected, case
        else:
            assert expected in answer, case
            assert "\n" not in answer
    assert not [each for each in hub.requests if "x.py" in each or ("named/resolve" in each and "train.csv" in each)]


def test_without_network_there_is_one_line(tmp_path):
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        (answer,) = read([{"dataset_name": "org/one"}], tmp_path, **environment)
        assert answer.startswith("data set org/one")
        assert "\n" not in answer
