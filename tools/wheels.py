"""Builds a release's wheels: one for each platform, with the kernels for every instruction set that it may have.

    make wheels

The library is loaded with ctypes, so a wheel serves every Python. All are built on one machine, here Debian on x86-64:
those for Linux by GCC, the one for macOS by zig, which brings what is linked with there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import ziglang

REPOSITORY = Path(__file__).parents[1]
LIBRARY = "jaxis/native/libjaxis.so"
GLIBC = (2, 28)  # of Debian 10, RHEL 8 and what came later: manylinux_2_28
ZIG = Path(ziglang.__file__).parent / "zig"

# One that GCC's headers call since version 11, and one that libstdc++'s part for exceptions does not show to others.
SMALL_FUNCTIONS = """
#include <cstdlib>
#include <new>
namespace std { void __throw_bad_array_new_length() { throw bad_array_new_length(); } }
namespace __cxxabiv1 { void __terminate(void (*handler)()) noexcept { handler(); std::abort(); } }
"""


@dataclass(frozen=True)
class Platform:
    """What a wheel is for, and how its library is compiled.

    Attributes:
      tag: The wheel's platform tag.
      system: CMake's name of the operating system.
      processor: CMake's name of the processor.
      compiler: The compiler's command line.
      isas: The instruction sets that the library must have, best first.
    """

    tag: str
    system: str
    processor: str
    compiler: tuple[str, ...]
    isas: tuple[str, ...]


_X86_ISAS = ("amx", "avx512vnni", "avx512", "avxvnni", "avx2", "portable")
_ARM_ISAS = ("i8mm", "dotprod", "neon", "portable")

PLATFORMS = (
    Platform(f"manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64", "Linux", "x86_64", ("x86_64-linux-gnu-g++",), _X86_ISAS),
    Platform(f"manylinux_{GLIBC[0]}_{GLIBC[1]}_aarch64", "Linux", "aarch64", ("aarch64-linux-gnu-g++",), _ARM_ISAS),
    Platform("macosx_11_0_arm64", "Darwin", "arm64", (str(ZIG), "c++", "-target", "aarch64-macos.11.0"), _ARM_ISAS),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the wheels go")
    parser.add_argument("--only", metavar="TEXT", default="", help="platforms whose tag has this text")
    arguments = parser.parse_args()
    platforms = [platform for platform in PLATFORMS if arguments.only in platform.tag]
    if not platforms:
        sys.exit(f"--only {arguments.only}: no platform's tag has it: {', '.join(p.tag for p in PLATFORMS)}")
    for platform in platforms:
        if shutil.which(platform.compiler[0]) is None:
            sys.exit(
                f"{platform.tag} needs {platform.compiler[0]}: on Debian, apt-get install g++ g++-aarch64-linux-gnu; "
                "or --only another platform"
            )
    for platform in platforms:
        wheel = build(platform, arguments.folder.resolve())
        print(f"{wheel.name}  {wheel.stat().st_size / 1e6:.1f} MB", flush=True)


def build(platform: Platform, folder: Path) -> Path:
    """Builds and checks the wheel of a platform. What was compiled stays in build/wheels, for the next time."""
    compiled = REPOSITORY / "build" / "wheels" / platform.tag
    compiled.mkdir(parents=True, exist_ok=True)
    settings = {
        "build-dir": str(compiled),
        "wheel.tags": f"py3-none-{platform.tag}",
        "cmake.define.CMAKE_SYSTEM_NAME": platform.system,
        "cmake.define.CMAKE_SYSTEM_PROCESSOR": platform.processor,
        "cmake.define.CMAKE_CXX_COMPILER": ";".join(platform.compiler),
        "cmake.define.JAXIS_ISAS": "all",
    }
    if platform.system == "Linux":
        settings["cmake.define.CMAKE_CXX_STANDARD_LIBRARIES"] = (
            f"{newer_functions(platform, compiled)} -Wl,--exclude-libs,ALL,--no-undefined"
        )
    else:
        settings["install.strip"] = "false"  # zig brings no strip, and nothing to debug with was made
    log = compiled / "wheel.log"
    # In a process of its own: what the compilers print goes to a file, and is read only if something fails.
    code = f"import scikit_build_core.build as backend; print(backend.build_wheel({str(folder)!r}, {settings!r}))"
    with log.open("w") as output:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT, check=False)
    lines = log.read_text().splitlines()
    wheel = folder / lines[-1] if done.returncode == 0 else None
    # A library that does not compile makes the backend build the wheel of machines without a compiler.
    if wheel is None or LIBRARY not in zipfile.ZipFile(wheel).namelist():
        if wheel is not None:
            wheel.unlink()
        errors = [line for line in lines if "error" in line.lower()] or lines
        sys.exit(
            f"{platform.tag}: {' '.join(platform.compiler)} built no library; {log} has all:\n"
            + "\n".join(errors[-10:])
        )
    if (why := why_not(platform, wheel, compiled)) is not None:
        wheel.unlink()
        sys.exit(f"{wheel.name}: {why}")
    return wheel


def newer_functions(platform: Platform, folder: Path) -> Path:
    """An archive of the functions that GCC calls and older systems' libstdc++ lacks: the library brings those it uses.

    Not all of libstdc++: linked statically, it needs the C library of the system that it was compiled on.
    """
    [compiler] = platform.compiler
    name = subprocess.run([compiler, "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=True)
    # Exceptions that go from one thread to another, constructors of string streams.
    members = ("eh_ptr.o", "sstream-inst.o")
    ar = f"{platform.processor}-linux-gnu-ar"
    subprocess.run([ar, "x", name.stdout.strip(), *members], cwd=folder, check=True)
    compile_ = [compiler, "-O2", "-fPIC", "-x", "c++", "-", "-c", "-o", "small.o"]
    subprocess.run(compile_, cwd=folder, input=SMALL_FUNCTIONS, text=True, check=True)
    archive = folder / "libnewer.a"
    archive.unlink(missing_ok=True)
    subprocess.run([ar, "rcs", archive.name, *members, "small.o"], cwd=folder, check=True)
    return archive


def why_not(platform: Platform, wheel: Path, compiled: Path) -> str | None:
    """What is wrong with a wheel: an instruction set is missing, or it needs more than its platform promises."""
    isas = tuple(re.findall(r"X\((\w+)\)", (compiled / "isas.h").read_text().partition("(X)")[2]))
    if isas != platform.isas:
        return f"it has kernels for {', '.join(isas)} and needs {', '.join(platform.isas)}; take a newer compiler"
    if platform.system != "Linux":
        return None
    show = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    shown = " ".join(subprocess.run(show, capture_output=True, text=True, check=True).stdout.split())
    found = re.search(r'the following platform tag: "manylinux_(\d+)_(\d+)_', shown)
    if found is None or (int(found[1]), int(found[2])) > GLIBC:
        return f"it does not run on all that {platform.tag} promises; auditwheel: {shown}"
    return None


if __name__ == "__main__":
    main()
