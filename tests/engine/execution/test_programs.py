"""The order in which programs are compiled."""

import contextlib
import threading
from typing import Any, cast

import pytest

from jaxis.engine.execution.programs import Programs


class Key(str):
    __slots__ = ()

    @property
    def description(self):
        return str(self)


class Executor:
    """Compiles a key's name as its program; those called "later" wait for `released`, and "broken" fails."""

    def __init__(self):
        self.released = threading.Event()
        self.compiled = []

    def compile(self, key):
        if key.startswith("later"):
            assert self.released.wait(60)
        self.compiled.append(key)
        if key == "broken" and self.compiled.count(key) == 1:
            raise RuntimeError("broken")
        return f"program of {key}"

    def close(self):
        pass


@pytest.fixture
def programs():
    executor = Executor()
    programs = Programs(cast(Any, executor), lambda _: contextlib.nullcontext())
    yield programs
    executor.released.set()
    programs.close()


def test_a_program_that_a_step_waits_for_passes_those_that_none_waits_for(programs):
    for number in range(4):
        programs.precompile(Key(f"later {number}"))
    programs.precompile(Key("now"))
    assert programs.get(Key("now")) == "program of now"
    assert programs.executor.compiled == ["now"]
    programs.executor.released.set()
    assert programs.get(Key("later 3")) == "program of later 3"
    assert programs.get(Key("now")) == "program of now"
    assert programs.executor.compiled.count("now") == 1
    assert programs.executor.compiled.count("later 3") == 1


def test_one_that_failed_while_a_step_waited_is_compiled_again(programs):
    for number in range(3):
        programs.precompile(Key(f"later {number}"))
    with pytest.raises(RuntimeError, match="broken"):
        programs.get(Key("broken"))
    assert programs.get(Key("broken")) == "program of broken"
