"""Runs Python in a process of its own, on several devices that the processor simulates."""

import os
import subprocess
import sys


def run_on_devices(*arguments: str, num_devices: int = 4, xla_flags: str | None = None) -> str:
    """Runs `python *arguments` on CPU devices; returns what it printed. Fails, with its errors, if it does.

    Args:
      *arguments: Arguments of Python, such as "-c" and a script, which can import the tests.
      num_devices: Devices.
      xla_flags: Other flags for XLA than this process has.
    """
    flags = os.environ.get("XLA_FLAGS", "") if xla_flags is None else xla_flags
    environment = os.environ | {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={num_devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout
