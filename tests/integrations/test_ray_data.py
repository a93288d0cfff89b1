"""Rows that several replicas share get the answers of one, whatever happens to a replica."""

import json
import tempfile
import threading
import time

import pytest

from jaxis.errors import EngineError
from jaxis.inference import InferenceConfig, JAXInferenceEngine
from jaxis.inference.journal import Journal
from jaxis.jsonl.source import JSONLSource
from tests.integrations.ray_cluster import ray_cluster, wait_for_actors

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]

NUM_ROWS = 160
MODEL = {"model_kwargs": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory": "8MiB"}}
GENERATION = {"temperature": 0.9, "max_new_tokens": 64}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with tempfile.TemporaryDirectory(prefix="ray") as folder, ray_cluster(folder):
        yield


@pytest.fixture(scope="module")
def input_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "input.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"What is {i} + {i % 7}?"}]} for i in range(NUM_ROWS)]
    rows[17] = {"messages": "broken"}
    path.write_text("not JSON\n" + "".join(json.dumps(row) + "\n" for row in rows[1:]))
    return path


@pytest.fixture(scope="module")
def expected(input_path):
    """The output of one engine."""
    output = input_path.parent / "one.jsonl"
    with JAXInferenceEngine(MODEL, generation_params=GENERATION, show_progress=False) as engine:
        engine.run(JSONLSource(input_path, "conversation_id"), engine.generation_params, output)
    return output.read_bytes()


def run(input_path, output, model=MODEL, num_replicas=2):
    from jaxis.integrations.ray_runs import run_conversations

    config = InferenceConfig.of({"model": model, "generation": GENERATION})
    return run_conversations(config, num_replicas, JSONLSource(input_path, "conversation_id"), output, None)


@pytest.fixture
def appended(monkeypatch):
    """The numbers of the rows that runs append to their journals."""
    numbers = []
    append = Journal.append

    def append_and_note(journal, results):
        append(journal, results)
        numbers.extend(result.row for result in results)

    monkeypatch.setattr(Journal, "append", append_and_note)
    return numbers


def test_a_killed_replica_loses_and_repeats_no_row(input_path, expected, tmp_path, appended):
    killed = []

    def kill():
        first, _ = wait_for_actors("MapWorker", 2)
        while not appended:
            time.sleep(0.001)
        first.kill()
        killed.append(len(appended))

    thread = threading.Thread(target=kill)
    thread.start()
    summary = run(input_path, tmp_path / "out.jsonl")
    thread.join()
    assert 0 < killed[0] < NUM_ROWS
    assert sorted(appended) == list(range(NUM_ROWS))
    assert (summary.completed, summary.failed) == (NUM_ROWS - 2, 2)
    assert (tmp_path / "out.jsonl").read_bytes() == expected


def test_an_interrupted_run_goes_on_with_another_number_of_replicas(input_path, expected, tmp_path, monkeypatch):
    output, append, kept = tmp_path / "out.jsonl", Journal.append, []

    def interrupted(journal, results):
        append(journal, results)
        kept.extend(results)
        if len(kept) > 30:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(input_path, output)
    with JAXInferenceEngine(MODEL, generation_params=GENERATION, show_progress=False) as engine:
        rows = []
        monkeypatch.setattr(Journal, "append", lambda j, results: (append(j, results), rows.extend(results)))
        engine.run(JSONLSource(input_path, "conversation_id"), engine.generation_params, output)
    assert len(rows) == NUM_ROWS - len(kept)
    assert output.read_bytes() == expected


def test_a_model_that_cannot_be_opened_is_one_clear_error(input_path, tmp_path):
    model = MODEL | {"model_kwargs": MODEL["model_kwargs"] | {"kv_cache_memory": "1KiB"}}
    with pytest.raises(EngineError, match=r"^the replicas have failed: .*kv_cache_memory[^\n]*$"):
        run(input_path, tmp_path / "out.jsonl", model)


def test_the_stage_answers_lines_of_a_dataset(input_path, expected):
    from jaxis.integrations.ray_data import ConversationAnswers

    generation = GENERATION | {"temperature": 0.0}
    dataset = ray.data.read_text(str(input_path)).map_batches(
        ConversationAnswers,
        fn_constructor_kwargs={"model": MODEL, "generation": generation},
        batch_size=50,
        num_cpus=0.5,
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    answers = [json.loads(row["text"]) for row in dataset.iter_rows()]
    with JAXInferenceEngine(MODEL, generation_params=generation, show_progress=False) as engine:
        inputs = [json.loads(line) for line in input_path.read_text().splitlines()[1:] if "broken" not in line]
        wanted = {item.messages[0].content: item.messages[1].content for item in engine.infer(inputs)}
    assert sum("error" in answer["metadata"] for answer in answers) == 2
    given = {answer["messages"][0]["content"]: answer["messages"] for answer in answers if len(answer["messages"]) > 1}
    assert {prompt: messages[1]["content"] for prompt, messages in given.items()} == wanted
