"""Prompts that another engine has computed: the answers of one engine alone, and no block is computed twice."""

from __future__ import annotations

import contextlib
import random
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis import SamplingParams
from jaxis.config.kv_transfer import KVTransferConfig
from jaxis.errors import ConfigError, RequestError
from jaxis.kernels import native
from tests.support.certificates import make_certificates, tls_files
from tests.support.tiny_checkpoints import variant
from tests.support.waiting import wait_until

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 5}
BLOCK_BYTES = 8192
same_bits = pytest.mark.skipif(not native.usable(), reason="the same bits, however a prompt is split, are native")


def prompt(number, length=60, vocabulary=400):
    return random.Random(number).choices(range(20, vocabulary), k=length)


@contextlib.contextmanager
def engines(start_llm, *roles, **arguments):
    """An engine for each role; a producer hands out blocks at a port of its own."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(start_llm(kv_transfer_config={"kv_port": 0, "kv_role": role}, **arguments))
            for role in roles
        ]


def with_params(params, **more):
    return SamplingParams(**GREEDY | more, extra_args=None if params is None else {"kv_transfer_params": params})


def num_leases(llm):
    """Blocks that are kept for another engine, or for a prompt that is about to be added."""
    store = llm.engine.connector.store
    with store._lock:
        store._free_ended()
        return len(store._leases)


def prefill(producer, *prompts):
    """What the prompts' answers say of where they were computed."""
    outputs = producer.generate(list(prompts), with_params({"do_remote_decode": True}, max_tokens=1))
    return [output.kv_transfer_params for output in outputs]


def decode(llm, tokens, params=None):
    """An answer's tokens and log-probabilities, and how many tokens of its prompt were found."""
    [output] = llm.generate([tokens], with_params(params))
    [completion] = output.outputs
    logprobs = [{token: value.logprob for token, value in entry.items()} for entry in completion.logprobs]
    return (completion.token_ids, logprobs), output.num_cached_tokens


def alone(llm, tokens):
    """The answer of an engine that computes everything itself."""
    llm.engine.reset_prefix_cache()
    answer, found = decode(llm, tokens)
    assert found == 0
    return answer


@same_bits
class TestAnswers:
    def test_full_blocks_of_a_prompt_are_found_and_its_answer_has_the_same_bits(self, start_llm, llm):
        with engines(start_llm, "kv_producer", "kv_consumer") as (producer, consumer):
            for length in (16, 17, 150):
                tokens = prompt(length, length)
                [params] = prefill(producer, tokens)
                found = (length - 1) // 16 * 16
                assert (params is None) == (found == 0)
                assert decode(consumer, tokens, params) == (alone(llm, tokens), found)
            sent, fetched = producer.engine.connector.stats["peer"], consumer.engine.connector.stats["peer"]
            assert sent.saved_bytes == fetched.loaded_bytes == fetched.loaded_blocks * BLOCK_BYTES > 0
            assert (fetched.missed_blocks, fetched.failed_blocks, sent.failed_blocks) == (0, 0, 0)

    def test_what_the_decoding_engine_has_is_not_sent_again(self, start_llm, llm):
        with engines(start_llm, "kv_both", "kv_both") as (one, other):
            first, second = prompt(0), prompt(0) + prompt(1)
            decode(other, first)
            [params] = prefill(one, second)
            assert decode(other, second, params) == (alone(llm, second), 112)
            assert other.engine.connector.stats["peer"].loaded_blocks == 4
            # And the other way round.
            [params] = prefill(other, prompt(2))
            assert decode(one, prompt(2), params)[1] == 48

    def test_engines_of_other_sizes_share_blocks_and_other_salts_find_nothing(self, start_llm, llm):
        sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "kv_cache_memory": "4MiB"}
        with (
            engines(start_llm, "kv_producer", **sizes) as [producer],
            engines(start_llm, "kv_consumer") as [consumer],
        ):
            salted = {"prompt_token_ids": prompt(0), "cache_salt": "a"}
            [params] = prefill(producer, salted)
            expected = alone(llm, prompt(0))
            assert decode(consumer, prompt(0), params) == (expected, 0)
            assert decode(consumer, salted, params) == (expected, 48)

    def test_windows_are_found(self, start_llm, checkpoint, tmp_path):
        check_family(start_llm, variant(tmp_path / "window", checkpoint("mistral"), sliding_window=21), [100])

    @pytest.mark.parametrize("name", ["Gemma 3", "Qwen3.5", "Falcon-H1", "Nemotron 3", "DeepSeek V3", "DeepSeek V3.2"])
    def test_windows_states_and_latents_are_found(self, start_llm, name):
        from tests.support import parity  # imports torch

        [family] = [family for family in parity.FAMILIES if family.name == name]
        check_family(start_llm, parity.checkpoint_folder(family), [17, 48, 49, 100], dtype="float32")

    def test_many_prompts_at_once_in_few_blocks(self, start_llm, llm):
        sizes = {"max_num_seqs": 4, "kv_cache_memory": 16 * BLOCK_BYTES, "max_model_len": 128}
        prompts = [prompt(number, 40 + 5 * number) for number in range(8)]
        with engines(start_llm, "kv_producer", "kv_consumer", **sizes) as (producer, consumer):
            given = prefill(producer, *prompts)
            outputs = consumer.generate(prompts, [with_params(params) for params in given])
            for tokens, output in zip(prompts, outputs, strict=True):
                assert output.outputs[0].token_ids == alone(llm, tokens)[0]
                assert output.num_cached_tokens == (len(tokens) - 1) // 16 * 16


def check_family(start_llm, folder, lengths, **arguments):
    """A model's prompts of these lengths are found, and have the answers of one engine alone."""
    with (
        engines(start_llm, "kv_producer", "kv_consumer", model=folder, **arguments) as (producer, consumer),
        start_llm(model=folder, **arguments) as llm,
    ):
        for length in lengths:
            tokens = prompt(length, length, 100)
            [params] = prefill(producer, tokens)
            (token_ids, logprobs), found = decode(consumer, tokens, params)
            expected_ids, expected_logprobs = alone(llm, tokens)
            assert token_ids == expected_ids
            for entry, expected in zip(logprobs, expected_logprobs, strict=True):
                assert entry == pytest.approx(expected, abs=1e-4)
            assert found == (length - 1) // 16 * 16


@same_bits
class TestFaults:
    def test_blocks_whose_lease_is_over_make_room_and_are_computed(self, start_llm, llm):
        config = {"kv_role": "kv_producer", "kv_port": 0, "kv_buffer_size": 6 * BLOCK_BYTES}
        with (
            engines(start_llm, "kv_consumer") as [consumer],
            start_llm(kv_transfer_config={**config, "kv_connector_extra_config": {"lease_seconds": 0.2}}) as producer,
        ):
            [first] = prefill(producer, prompt(0))
            assert prefill(producer, prompt(1))[0] is not None
            # Four of them have no room while the first prompt's are kept.
            wait_until(lambda: num_leases(producer) == 0)
            prefill(producer, prompt(2), prompt(3))
            assert decode(consumer, prompt(0), first) == (alone(llm, prompt(0)), 0)
            assert consumer.engine.connector.stats["peer"].missed_blocks == 3

    def test_another_model_is_refused_and_one_that_has_ended_is_not_waited_for(
        self, checkpoint, start_llm, llm, tmp_path, caplog
    ):
        folder = variant(tmp_path / "other", checkpoint(), files={"model.safetensors": None})
        tensors = load_file(checkpoint() / "model.safetensors")
        name = "model.layers.0.self_attn.k_proj.weight"
        save_file(tensors | {name: np.flip(tensors[name], 0).copy()}, folder / "model.safetensors")
        expected = alone(llm, prompt(0))
        with engines(start_llm, "kv_consumer") as [consumer]:
            with engines(start_llm, "kv_producer", model=folder) as [producer]:
                [params] = prefill(producer, prompt(0))
                assert decode(consumer, prompt(0), params) == (expected, 0)
                assert "its model, version, machine or arguments differ" in caplog.text
            consumer.engine.reset_prefix_cache()
            started = time.monotonic()
            assert decode(consumer, prompt(0), params) == (expected, 0)
            assert time.monotonic() - started < 2
            assert consumer.engine.connector.stats["peer"].failed_blocks == 2

    def test_a_part_that_an_engine_does_not_have_is_left_out(self, start_llm, llm):
        expected = alone(llm, prompt(0))
        with engines(start_llm, "kv_producer", "kv_producer", "kv_consumer") as (producer, other, consumer):
            [params] = prefill(producer, prompt(0))
            assert prefill(consumer, prompt(1)) == [None]
            assert decode(other, prompt(0), params) == (expected, 0)
            for given in ({}, {"do_remote_prefill": True}, {**params, "remote_block_ids": [1, 2], "tp_size": 1}):
                assert decode(consumer, prompt(0), given)[0] == expected

    def test_a_reset_takes_back_what_was_promised(self, start_llm):
        with engines(start_llm, "kv_producer", "kv_consumer") as (producer, consumer):
            [params] = prefill(producer, prompt(0))
            producer.engine.reset_prefix_cache()
            assert decode(consumer, prompt(0), params)[1] == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"do_remote_prefill": "yes"}, "kv_transfer_params.do_remote_prefill='yes' must be of type bool"),
        ({"remote_host": 5}, "remote_host=5 must be of type str"),
        ({"remote_port": 1 << 16}, "remote_port=65536 must be a port"),
        ({"remote_port": True}, "remote_port=True must be of type int"),
        ([1], r"kv_transfer_params=\[1\] must be a dict"),
    ],
)
def test_parameters_of_a_wrong_type_are_refused(params, message):
    with pytest.raises(RequestError, match=message):
        with_params(params)


def test_an_engine_without_a_part_refuses_the_parameters(llm):
    with pytest.raises(RequestError, match="kv_transfer_params needs an engine with kv_transfer_config"):
        prefill(llm, prompt(0))
    with pytest.raises(RequestError, match="must be a dict with no key but kv_transfer_params"):
        SamplingParams(extra_args={"other": 1})


def test_vllms_values_that_change_nothing_are_taken():
    config = KVTransferConfig.of(
        {"kv_role": "kv_both", "kv_rank": 1, "kv_parallel_size": 2, "kv_buffer_device": "cuda", "kv_connector": None}
    )
    assert config == KVTransferConfig(kv_role="kv_both")
    assert (config.kv_ip, config.kv_port, config.kv_buffer_size) == ("127.0.0.1", 14579, 1e9)
    assert KVTransferConfig.of(None) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], r"kv_transfer_config=\[\] must be a dict"),
        ({}, "kv_role=None must be one of kv_producer, kv_consumer, kv_both"),
        ({"kv_role": "both"}, "kv_role='both' must be one of"),
        ({"kv_role": "kv_both", "kv_connector": "NixlConnector"}, "kv_connector='NixlConnector' is not supported"),
        ({"kv_role": "kv_both", "kv_load_failure_policy": "fail"}, "kv_load_failure_policy='fail' is not supported"),
        ({"kv_role": "kv_both", "kv_connector_module_path": "x"}, "no code is loaded"),
        ({"kv_role": "kv_both", "kv_prot": 1}, "kv_transfer_config has the unknown key 'kv_prot'; known: "),
        ({"kv_role": "kv_both", "kv_port": "1"}, "kv_port='1' must be of type int"),
        ({"kv_role": "kv_both", "kv_port": -1}, "kv_port=-1 must be a port"),
        ({"kv_role": "kv_both", "kv_buffer_size": 0}, "kv_buffer_size=0 must be a number greater than 0"),
        ({"kv_role": "kv_both", "kv_ip": "0.0.0.0"}, "kv_ip='0.0.0.0' is no address that others could reach"),
        ({"kv_role": "kv_producer", "kv_ip": "10.0.0.1"}, "kv_ip='10.0.0.1' is open to other machines"),
        ({"kv_role": "kv_both", "kv_connector_extra_config": {"backends": []}}, "has the unknown key 'backends'"),
        ({"kv_role": "kv_both", "kv_connector_extra_config": [1]}, r"kv_connector_extra_config=\[1\] must be a dict"),
    ],
)
def test_what_cannot_be_honoured_is_one_clear_line(config, message):
    with pytest.raises(ConfigError, match=message) as error:
        KVTransferConfig.of(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_prefix_caching": False}, "kv_transfer_config does not combine with enable_prefix_caching=False"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "kv_transfer_config does not combine with nnodes=2"),
        ({"kv_transfer_config": {"kv_role": "kv_both", "kv_buffer_size": 100}}, "kv_buffer_size=100 holds no block"),
        ({"kv_transfer_config": {"kv_role": "kv_both", "kv_buffer_size": 1e15}}, "of memory that are free"),
        ({"kv_transfer_config": {"kv_role": "kv_both", "kv_ip": "192.0.2.1"}}, "is open to other machines"),
    ],
)
def test_engines_that_cannot_take_part_say_so_in_one_line(start_llm, arguments, message):
    with pytest.raises(ConfigError, match=message) as error:
        start_llm(**{"kv_transfer_config": {"kv_role": "kv_both", "kv_port": 0}} | arguments)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("pem"))


def with_tls(role, files):
    return {"kv_role": role, "kv_port": 0, "kv_connector_extra_config": files}


@same_bits
def test_engines_with_certificates_of_one_ca_hand_over_blocks_and_others_get_none(start_llm, llm, folder):
    with (
        start_llm(kv_transfer_config=with_tls("kv_producer", tls_files(folder, "one"))) as producer,
        start_llm(kv_transfer_config=with_tls("kv_consumer", tls_files(folder, "two"))) as consumer,
        start_llm(kv_transfer_config=with_tls("kv_consumer", tls_files(folder, "other"))) as stranger,
        engines(start_llm, "kv_consumer") as [plain],
    ):
        [params] = prefill(producer, prompt(0))
        for other in (stranger, plain):
            assert decode(other, prompt(0), params) == (alone(llm, prompt(0)), 0)
        assert decode(consumer, prompt(0), params)[1] == 48


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ssl_keyfile": None}, "TLS needs ssl_certfile, ssl_keyfile, ssl_ca_certs: ssl_keyfile is missing"),
        ({"ssl_certfile": "absent.pem"}, r"ssl_certfile .*absent.pem cannot be read: No such file"),
        ({"ssl_keyfile": "two.key"}, r"ssl_keyfile .*two.key is not the key of the certificate in .*one.pem"),
        ({"ssl_keyfile": "ca.pem"}, r"ssl_keyfile .*ca.pem holds no private key in PEM format"),
        ({"ssl_ca_certs": "one.key"}, r"ssl_ca_certs .*one.key holds no certificate in PEM format"),
        ({"ssl_ca_certs": 1}, "ssl_ca_certs=1 must be of type str"),
    ],
)
def test_files_of_tls_that_cannot_be_used_are_one_clear_line(folder, change, message):
    changed = {key: str(folder / file) if isinstance(file, str) else file for key, file in change.items()}
    files = {key: value for key, value in (tls_files(folder, "one") | changed).items() if value is not None}
    with pytest.raises(ConfigError, match=message) as error:
        KVTransferConfig.of(with_tls("kv_both", files)).ssl_context(is_server=True)
    assert "\n" not in str(error.value)
