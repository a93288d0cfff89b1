"""Processes with limits: answers come back, limits are named, and whatever one does, the next request is answered."""

import os
import threading
import time

import psutil
import pytest

from jaxis.host.limited_process import LimitedProcesses, LimitExceededError, ProcessLimits

WORKER = """
import os, resource, signal, time

def answer(request, data):
    match request["do"]:
        case "echo":
            return {"echo": request.get("value")}, len(data), (data[:1000], data[1000:])
        case "loop":
            while True:
                pass
        case "allocate":
            return {"size": len(bytes(1 << 40))}, 0, ()
        case "long":
            return {}, request["size"], (bytes(request["size"]),)
        case "own limit":
            return {"limit": "output"}, 0, ()
        case "crash":
            os.kill(os.getpid(), getattr(signal, request["signal"]))
        case "exit":
            os._exit(0)
        case "raise":
            raise SystemExit("")
        case "garbage":
            import socket, sys
            socket.socket(fileno=os.dup(int(sys.argv[2]))).sendall(b"\\2" + bytes(15) + b"{]")
            time.sleep(60)
        case "sleep":
            time.sleep(request["seconds"])
            return {}, 0, ()
        case "limits":
            return {"core": resource.getrlimit(resource.RLIMIT_CORE)[0], "pid": os.getpid()}, 0, ()
"""
LIMITS = ProcessLimits(seconds=1, memory_bytes=300 << 20, answer_bytes=1 << 20)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    path = tmp_path_factory.mktemp("worker") / "worker.py"
    path.write_text(WORKER)
    return path


@pytest.fixture
def processes(worker):
    processes = LimitedProcesses(worker, large_bytes=1 << 16, max_running=2)
    yield processes
    processes.close()


def pid(processes):
    return processes.ask({"do": "limits"}, LIMITS)[0]["pid"]


def test_messages_and_data_come_back_as_they_were(processes):
    value = {"text": "é\U0001f600\ud800\0", "numbers": [1, -2.5, None]}
    for data in (b"", bytes(range(256)), os.urandom(3_000_000)):
        limits = ProcessLimits(1, 300 << 20, len(data) + 1000)
        assert processes.ask({"do": "echo", "value": value}, limits, data) == ({"echo": value}, data)


@pytest.mark.parametrize(
    ("request_", "limit"),
    [
        ({"do": "loop"}, "time"),
        ({"do": "allocate"}, "memory"),
        ({"do": "long", "size": 1 << 20}, "output"),
        ({"do": "own limit"}, "output"),
        ({"do": "crash", "signal": "SIGSEGV"}, "memory"),
        ({"do": "crash", "signal": "SIGBUS"}, "ended"),
        ({"do": "exit"}, "ended"),
        ({"do": "raise"}, "ended"),
        ({"do": "garbage"}, "ended"),
    ],
)
def test_the_limit_that_ended_a_request_is_named_and_the_next_one_is_answered(request_, limit, processes):
    first = pid(processes)
    start = time.process_time()
    with pytest.raises(LimitExceededError) as error:
        processes.ask(request_, LIMITS)
    assert error.value.limit == limit
    assert time.process_time() - start < 0.5  # of this process
    assert not psutil.pid_exists(first)
    assert pid(processes) != first


def test_a_process_is_used_again_unless_its_answer_was_large(processes):
    first = pid(processes)
    processes.ask({"do": "long", "size": 1 << 15}, LIMITS)
    assert pid(processes) == first
    processes.ask({"do": "long", "size": 1 << 17}, LIMITS)
    assert pid(processes) != first


def test_a_process_that_was_killed_is_replaced(processes):
    first = pid(processes)
    psutil.Process(first).kill()
    while psutil.Process(first).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert pid(processes) != first


def test_a_process_that_was_started_before_answers_the_first_request(processes):
    processes.start()
    [started] = processes.waiting_pids
    processes.start()
    assert processes.waiting_pids == [started]
    assert pid(processes) == started
    assert processes.waiting_pids == [started]
    processes.close()
    assert not psutil.pid_exists(started)


def test_no_more_than_so_many_requests_run_at_a_time(processes):
    own = psutil.Process()
    before = len(own.children())
    requests = [threading.Thread(target=processes.ask, args=({"do": "sleep", "seconds": 0.3}, LIMITS)) for _ in "1234"]
    for request in requests:
        request.start()
    most = 0
    while any(request.is_alive() for request in requests):
        most = max(most, len(own.children()) - before)
        time.sleep(0.02)
    assert most == 2


def test_there_are_no_core_dumps(processes):
    assert processes.ask({"do": "limits"}, LIMITS)[0]["core"] == 0


def test_a_fork_has_processes_of_its_own(processes):
    first = pid(processes)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        other = pid(processes)
        processes.close()
        os.write(writer, str(other).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert int(pipe.read()) != first
    assert pid(processes) == first
