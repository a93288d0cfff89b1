"""JAXInferenceEngine with the embedded model: both forms of the call, order, failures, files."""

import json

import pytest

from jaxis import SamplingParams
from jaxis.errors import ConfigError
from jaxis.inference import Conversation, GenerationParams, InferenceConfig, JAXInferenceEngine, Message, ModelParams
from jaxis.inference.run import with_row_seed
from jaxis.jsonl.source import ListSource, Row

SHORT = GenerationParams(max_new_tokens=16)
BROKEN = {"conversation_id": "broken", "messages": [{"role": "user", "content": [{"type": "image_url", "url": "x"}]}]}


@pytest.fixture(scope="module")
def engine():
    params = ModelParams(model_kwargs={"max_num_seqs": 4, "kv_cache_memory": "8MiB"})
    with JAXInferenceEngine(params, generation_params=SHORT, show_progress=False) as engine:
        yield engine


def question(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


def sums(num_rows):
    return [question(f"What is {i} + 1?", conversation_id=f"c{i}", metadata={"i": i}) for i in range(num_rows)]


def test_answers_are_those_of_llm_chat_in_order(engine):
    messages = [row["messages"] for row in sums(9)]
    expected = engine.llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=16), progress=False)
    results = engine.infer(sums(9))
    for i, (result, output) in enumerate(zip(results, expected, strict=True)):
        [completion] = output.outputs
        assert result.conversation_id == f"c{i}"
        assert [message.to_dict() for message in result.messages] == [
            messages[i][0],
            {"role": "assistant", "content": completion.text},
        ]
        num_prompt, num_tokens = len(output.prompt_token_ids), len(completion.token_ids)
        assert result.metadata == {
            "i": i,
            "finish_reason": completion.finish_reason,
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_tokens,
                "total_tokens": num_prompt + num_tokens,
            },
        }
    assert "Paris" in engine.infer([question("What is the capital of France?")])[0].messages[-1].content


def test_the_forms_of_the_call_agree(engine, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in sums(3)))
    config = InferenceConfig(generation=SHORT)
    expected = engine.infer(sums(3))
    objects = [Conversation([Message("user", f"What is {i} + 1?")], f"c{i}", {"i": i}) for i in range(3)]
    assert engine.infer(conversations=objects, generation_params=SHORT) == expected
    assert engine.infer(input=sums(3), inference_config=config) == expected
    assert engine.infer(objects, {"generation": {"max_new_tokens": 16}}) == expected
    files = {"input_path": str(path), "output_path": str(tmp_path / "out.jsonl"), "generation": SHORT}
    results = engine.infer(inference_config=files)
    assert list(results) == expected
    assert results[1:] == expected[1:]
    assert results[-1] == expected[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_bad_row_fails_alone_and_says_why(engine, tmp_path):
    rows = [*sums(2), BROKEN, question("x " * 5000, conversation_id="long"), question("What is 2 + 2?", tools=[])]
    expected = engine.infer(rows)
    assert [("error" in row.metadata) for row in expected] == [False, False, True, True, False]
    error = expected[2].metadata["error"]
    assert (error["type"], error["retryable"]) == ("RequestError", False)
    assert "image_url" in error["message"]
    assert "max_model_len" in expected[3].metadata["error"]["message"]
    assert len(expected[3].messages) == 1

    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "nothing\n")
    progress = tmp_path / "progress.json"
    config = {"input_path": str(path), "output_path": str(tmp_path / "out.jsonl"), "progress_path": str(progress)}
    results = engine.infer(inference_config={**config, "generation": SHORT})
    assert [row.metadata for row in results[:4]] == [row.metadata for row in expected[:4]]
    assert "line 6" in results[5].metadata["error"]["message"]
    state = json.loads(progress.read_text())
    assert (state["total"], state["completed"], state["failed"]) == (6, 3, 3)
    assert state["updated_at"].endswith("+00:00")


def test_inputs_are_exactly_one(engine, tmp_path):
    for arguments in ({}, {"conversations": [], "input": []}, {"input": [], "inference_config": {"input_path": "x"}}):
        with pytest.raises(ConfigError, match="inputs: give exactly one"):
            engine.infer(**arguments)
    with pytest.raises(ConfigError, match="both given"):
        engine.infer([], {}, generation_params=SHORT)
    with pytest.raises(ConfigError, match="is not this engine's model"):
        engine.infer([], {"model": {"model_name": "another"}})
    with pytest.raises(ConfigError, match="same conversation_id 'a'"):
        engine.infer([question("x", conversation_id="a"), question("y", conversation_id="a")])
    with pytest.raises(ConfigError, match=r"conversations\[0\] is int"):
        engine.infer([7])
    assert engine.infer([]) == []


def test_objects_of_another_class_come_back_as_that_class(engine):
    class Theirs:
        def __init__(self, value):
            self.value = value

        def model_dump(self, mode, exclude_none):
            return self.value

        @classmethod
        def model_validate(cls, value):
            return cls(value)

    [result] = engine.infer([Theirs(question("What is 2 + 2?"))])
    assert isinstance(result, Theirs)
    assert result.value["messages"][-1]["role"] == "assistant"


def test_sampled_rows_of_a_file_have_seeds_of_their_own_that_repeat(engine, tmp_path):
    rows = [question("Tell me something.", conversation_id=str(i)) for i in range(6)]
    generation = GenerationParams(max_new_tokens=16, temperature=1.5)
    outputs = []
    for name in ("one", "two"):
        engine.infer(rows, {"output_path": str(tmp_path / name), "generation": generation})
        outputs.append((tmp_path / name).read_bytes())
    assert outputs[0] == outputs[1]
    sampled = SamplingParams(temperature=1.0)
    seeds = {with_row_seed(sampled, key, Row(i, {}, "")).seed for key in "ab" for i in range(100)}
    assert len(seeds) == 200
    assert with_row_seed(SamplingParams(seed=7), "a", Row(0, {}, "")).seed == 7


def test_tools_reach_the_template(engine):
    template = "{{ tools | tojson }}{{ messages[0].content }}"
    params = ModelParams(chat_template=template, model_kwargs={"max_num_seqs": 1, "kv_cache_memory": "8MiB"})
    tool = {"type": "function", "function": {"name": "add"}}
    with JAXInferenceEngine(params, show_progress=False) as own:

        def num_prompt_tokens(generation, **fields):
            [result] = own.infer([question("hi", **fields)], generation_params=generation)
            return result.metadata["usage"]["prompt_tokens"]

        def expected(tools):
            return len(own.llm.tokenizer.encode(json.dumps(tools) + "hi", add_special_tokens=False))

        one = {"max_new_tokens": 1}
        assert num_prompt_tokens(one, tools=[tool]) == expected([tool])
        assert num_prompt_tokens({**one, "tools": [tool, tool]}) == expected([tool, tool])
        assert num_prompt_tokens({**one, "tool_choice": "none"}, tools=[tool]) == expected(None)


def test_an_interrupted_call_goes_on_where_it_stopped(engine, tmp_path, monkeypatch):
    config = {"output_path": str(tmp_path / "out.jsonl"), "generation": SHORT}
    expected = engine.infer(sums(30))
    read = ListSource.rows

    def interrupted(self, wanted):
        for row in read(self, wanted):
            if row.index == 20:
                raise KeyboardInterrupt
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(ListSource, "rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.infer(sums(30), config)
    assert not engine.llm.engine.has_unfinished
    [scratch] = tmp_path.iterdir()
    kept = {int(line.split()[1]) for line in scratch.read_bytes().splitlines()}
    assert 0 < len(kept) <= 20
    seen = []

    def watched(self, wanted):
        for row in read(self, wanted):
            seen.append(row.index)
            yield row

    monkeypatch.setattr(ListSource, "rows", watched)
    assert list(engine.infer(sums(30), config)) == expected
    assert set(seen) == set(range(30)) - kept
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_other_parameters_take_no_rows_of_an_interrupted_run(engine, tmp_path, monkeypatch):
    run_keys = []
    monkeypatch.setattr("jaxis.inference.engine.run_to_output", lambda *args, **kwargs: run_keys.append(args[3]))
    source = ListSource(sums(3), "conversation_id")
    changes = [{}, {"temperature": 0.1}, {"stop_strings": ["x"]}, {"tools": [{"type": "function"}]}, {"seed": 1}]
    for change in changes:
        engine.run(source, GenerationParams(**change), tmp_path / "out")
    engine.run(ListSource(sums(4), "conversation_id"), GenerationParams(), tmp_path / "out")
    engine.run(source, GenerationParams.of({"batch_size": 8}), tmp_path / "out")
    assert len(set(run_keys)) == len(changes) + 1
    assert run_keys[-1] == run_keys[0]


def test_what_json_cannot_hold_is_refused_before_it_runs(engine, tmp_path):
    rows = [question("x", metadata={"when": object()})]
    assert "when" in engine.infer(rows)[0].metadata
    with pytest.raises(ConfigError, match=r"conversations\[0\] cannot be written"):
        engine.infer(rows, {"output_path": str(tmp_path / "out.jsonl")})
