"""`jaxis pack`."""

import pytest

from jaxis import SamplingParams
from jaxis.kernels import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs the native kernels")


def test_writes_a_folder_that_answers(invoke, checkpoint, tmp_path, start_llm):
    result = invoke("pack", checkpoint(), tmp_path / "p", "--quantization", "int8")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines()[-1] == f"to try it: jaxis chat {tmp_path / 'p'}"
    with start_llm(tmp_path / "p") as llm:
        assert llm.generate("the cat", SamplingParams(max_tokens=3))[0].finished
    again = invoke("pack", tmp_path / "p", tmp_path / "q")
    assert again.exit_code == 1
    assert again.stderr == f"jaxis: error: {tmp_path / 'p'} is packed already: copy it\n"
    assert not (tmp_path / "q").exists()
