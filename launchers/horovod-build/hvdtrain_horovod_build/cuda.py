"""What cmake must know to build Horovod's NCCL operations from what torch's own wheels bring.

The wheels have a layout of their own: a folder for the toolkit, one for NCCL, whose library is there by its full name
alone. Neither a GPU nor a driver is needed to build.
"""

import os
import sys
from pathlib import Path


def wheels() -> Path:
    """Returns the folder of NVIDIA's wheels, beside torch."""
    import torch

    return Path(torch.__file__).parent.parent / "nvidia"


def toolkit() -> Path:
    """Returns the folder of CUDA's toolkit, and shows its libraries to the linkers that cmake starts.

    The user's choice comes first: HOROVOD_CUDA_HOME names a toolkit.
    """
    import torch

    if torch.version.cuda is None:
        sys.exit(
            f"torch {torch.__version__} is built without CUDA, so Horovod beside it cannot have NCCL"
        )
    major = torch.version.cuda.split(".")[0]
    home = Path(os.environ.setdefault("HOROVOD_CUDA_HOME", str(wheels() / f"cu{major}")))
    if not (home / "bin" / "nvcc").exists():
        sys.exit(f"{home / 'bin'} has no nvcc: let HOROVOD_CUDA_HOME name a CUDA {major} toolkit")
    # nvcc of CUDA 13.0 looks for its libraries in lib64, which its wheels do not have.
    libraries = [str(home / "lib"), os.environ.get("LIBRARY_PATH", "")]
    os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    return home


def configure(home: Path) -> list[str]:
    """Returns definitions for a build with NCCL; sets the environment of cmake, and of the nvcc that it calls.

    The user's choice comes first: HOROVOD_NCCL_HOME names a NCCL, and HOROVOD_BUILD_CUDA_CC_LIST
    ("90,100") the architectures, which are otherwise all that nvcc knows.

    Args:
        home: of the toolkit.
    """
    os.environ["PATH"] = (
        f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"  # whose nvcc Horovod asks
    )
    definitions = [
        f"-DCUDAToolkit_ROOT={home}",
        "-DCMAKE_CUDA_ARCHITECTURES=OFF",
    ]  # Horovod adds -gencode itself
    definitions += [
        f"-DCUDA_CUDART={library}" for library in home.glob("lib/libcudart.so.*")
    ]  # no libcudart.so in it
    if "HOROVOD_NCCL_HOME" not in os.environ:
        nccl = wheels() / "nccl"
        definitions += [
            f"-DNCCL_INCLUDE_DIR={nccl / 'include'}",
            f"-DNCCL_LIBRARY={nccl / 'lib' / 'libnccl.so.2'}",
        ]
    return definitions
