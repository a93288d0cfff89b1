"""Random requests with images through a small engine: answers, blocks, embeddings and memory when they are done."""

import gc
import random

import psutil

from jaxis import LLM, SamplingParams
from jaxis.offline_requests import WantedRequest
from tests.support.leak_check import no_blocks_leaked
from tests.support.vision_checkpoints import random_image, write_mistral3

COUNT, NUM_IMAGES, MOST_RUNNING, MAX_TOKENS = 2000, 12, 9, (1, 3, 24, 60)
TEXTS = ("Look: ", "What is on these pictures? ", "The same long beginning of several blocks of the cache: ")
ENGINE = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "block_size": 16, "max_model_len": 160}


def test_random_requests_answer_as_alone_and_leave_nothing(tmp_path, monkeypatch):
    """With a prefix cache too small for all, preemption, abortions at every time, and embeddings that are dropped."""
    write_mistral3(tmp_path)
    rng = random.Random(0)
    images = [random_image(8 + 5 * i, 60 - 4 * i, seed=i) for i in range(NUM_IMAGES)]
    params = {n: SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=0) for n in MAX_TOKENS}
    monkeypatch.setattr("jaxis.image_encoder.encoder._CACHE_BYTES", 8_000)  # of one or two images
    with LLM(str(tmp_path), kv_cache_memory="168KiB", show_progress=False, **ENGINE) as llm:
        encoder = llm.engine.runner.feature("inputs").encoder

        def prompt(text, chosen):
            data = {"image": [images[i] for i in chosen]}
            return {"prompt": TEXTS[text] + "[IMG]" * len(chosen), "multi_modal_data": data}

        kinds = [(text, tuple(rng.sample(range(NUM_IMAGES), number))) for text in range(3) for number in (0, 1, 1, 1)]
        kinds += [(text, tuple(rng.sample(range(0, NUM_IMAGES, 5), 2))) for text in range(2)]
        alone = {}
        for kind in kinds:
            llm.engine.reset_prefix_cache()
            [output] = llm.generate([prompt(*kind)], params[MAX_TOKENS[-1]])
            [answer] = output.outputs
            chosen = zip(answer.token_ids, answer.logprobs, strict=True)
            alone[kind] = answer.token_ids, [at[token].logprob.hex() for token, at in chosen]

        running, numbers, memory = {}, {"finished": 0, "aborted": 0}, []
        with no_blocks_leaked(llm):
            for i in range(COUNT):
                kind, size = rng.choice(kinds), rng.choice(MAX_TOKENS)
                queued = []
                llm.requests.add(queued, [WantedRequest(llm._tokenize(prompt(*kind), "the prompt"), params[size])])
                running[queued[0]] = kind
                while len(running) > rng.randrange(MOST_RUNNING if i + 1 < COUNT else 1):
                    if rng.random() < 0.03:
                        aborted = rng.choice(list(running))
                        llm.requests.abort([aborted])
                        check(aborted, alone[running.pop(aborted)])
                        numbers["aborted"] += 1
                        continue
                    llm.requests.step()
                    for request in [each for each in running if each.finished]:
                        check(request, alone[running.pop(request)])
                        numbers["finished"] += 1
                if i in (COUNT // 5, COUNT - 1):
                    gc.collect()
                    memory.append(psutil.Process().memory_info().rss >> 20)
        assert not encoder._held
        assert not encoder._uses
        assert sum(rows.nbytes for rows in encoder._unused.values()) == encoder._unused_bytes <= 8_000
        assert llm.engine.num_preemptions > 0
        assert encoder.num_encoded > 2 * len({image for _, chosen in kinds for image in chosen})
        assert min(numbers.values()) > COUNT // 50
        assert memory[1] - memory[0] < 32, memory
        print(f"{COUNT} requests: {numbers}, {llm.engine.num_preemptions} preemptions, ", end="")
        print(f"{encoder.num_encoded} images encoded, {memory} MiB after a fifth and at the end")


def check(request, alone):
    """What a request was given so far is what it was given alone."""
    tokens, logprobs = alone
    output = request.output()
    [answer] = output.outputs
    number = len(answer.token_ids)
    assert list(answer.token_ids) == list(tokens[:number])
    given = [at[token].logprob.hex() for token, at in zip(answer.token_ids, answer.logprobs or [], strict=True)]
    assert given == logprobs[:number]
