"""Images in conversations of jaxis infer, and in files of jaxis run-batch."""

import base64
import json

from jaxis import SamplingParams
from jaxis.inference import JAXInferenceEngine
from jaxis.inference.batch import run_rows
from jaxis.inference.openai_batch import BatchTask, served_model
from jaxis.jsonl.source import Row
from tests.support.vision_checkpoints import random_image, write_mistral3

ENGINE = {"max_num_batched_tokens": 48, "block_size": 16, "kv_cache_memory": "2MiB"}


def test_files_of_requests_have_images(tmp_path):
    folder, image, path = tmp_path / "model", random_image(40, 24), tmp_path / "a.png"
    folder.mkdir()
    write_mistral3(folder)
    image.save(path)
    data = base64.b64encode(path.read_bytes()).decode()
    url = f"data:image/png;base64,{data}"
    items = [
        {"type": "image_path", "content": str(path)},
        {"type": "image_url", "content": url},
        {"type": "image_binary", "binary": data},
        {"type": "image_path", "content": str(tmp_path / "missing.png")},
        {"type": "image_url", "content": "https://example.com/a.png"},
    ]
    question = {"type": "text", "content": "What?"}
    rows = [{"messages": [{"role": "user", "content": [item, question]}]} for item in items]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"model_name": str(folder), "model_max_length": 512, "model_kwargs": ENGINE}
    generation = {"max_new_tokens": 8, "temperature": 0}
    config = {"input_path": str(tmp_path / "in.jsonl"), "output_path": str(tmp_path / "out.jsonl")}
    with JAXInferenceEngine(arguments, show_progress=False) as engine:
        engine.infer(inference_config={**config, "generation": generation})
        answered = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]
        [expected] = engine.llm.chat(
            [{"role": "user", "content": parts}], SamplingParams(temperature=0, max_tokens=8), progress=False
        )
        for row, given in zip(answered[:3], rows, strict=False):
            assert row["messages"] == [
                *given["messages"],
                {"role": "assistant", "content": expected.outputs[0].text},
            ]
        errors = [row["metadata"]["error"]["message"] for row in answered[3:]]
        assert ["no readable file" in errors[0], "nothing is fetched" in errors[1]] == [True, True]

        task = BatchTask(served_model(engine.llm, ["m"], "none", "none"), "key")
        bodies = {
            "/v1/chat/completions": {
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, parts[1]]}]
            },
            "/v1/responses": {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "image_url": url},
                            {"type": "input_text", "text": "What?"},
                        ],
                    }
                ]
            },
        }
        for i, (path, body) in enumerate(bodies.items()):
            row = Row(i, {"custom_id": f"{i}", "url": path, "body": {**body, "temperature": 0}}, f"{i}")
            [[(_, output)]] = [
                finished for finished in run_rows(engine.llm.engine, iter([row]), task.prepare) if finished
            ]
            assert output.outputs[0].token_ids[:8] == expected.outputs[0].token_ids
