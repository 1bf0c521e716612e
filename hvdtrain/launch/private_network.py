"""A private network for a job on this machine: a network namespace with loopback alone.

mpirun opens control ports on all interfaces, and horovodrun an HTTP store, and neither can be told
otherwise. In the namespace only the job's processes reach them.

The job also gets a folder in memory that only it sees, for the files of starters and MPI. The
kernel removes the folder with the job's last process. A killed starter cannot remove its files:
mpirun's in the temporary folder would end the next mpirun with the same process number, and MPI's
shared memory would stay until the next boot. The job shares all other files, and processes, with
this machine.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Mapping
from fcntl import ioctl
from pathlib import Path

from hvdtrain.base.config import recipes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.config.untrusted import is_url
from hvdtrain.base.system.own_code import is_code

# linux/sched.h
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
# sys/mount.h
_MS_NOSUID = 0x2
_MS_NODEV = 0x4
_MS_REC = 0x4000
_MS_SLAVE = 0x80000
# linux/sockios.h
_SIOCSIFFLAGS = 0x8914
# linux/if.h: IFF_UP | IFF_RUNNING
_UP_AND_RUNNING = 0x41
# Sources of images that never need the network; see data/sources/.
_WITHOUT_DOWNLOAD = {"digits", "turntable"}


def needs_network(config: RunConfig) -> bool:
    """Returns whether the ranks of a job read from a URL, or may have to download something.

    A user's code may always.
    """
    from hvdtrain.data.build import is_built
    from hvdtrain.data.recipe import Recipe
    from hvdtrain.data.storage import cache_root

    if is_url(config.dataset) or is_code(config.dataset) or config.pretrained == "imagenet":
        return True
    if config.dataset not in recipes.names("datasets"):
        return False
    recipe = Recipe.load(config.dataset)
    if recipe.source in _WITHOUT_DOWNLOAD:
        return False
    request = recipe.request()
    return not is_built(request, cache_root() / "datasets" / f"{config.dataset}-{request.key[:12]}")


def variables_of(scratch: Path) -> dict[str, str]:
    """Returns variables that make mpirun and MPI keep their files in a folder."""
    return {
        "PRTE_MCA_prte_tmpdir_base": str(scratch),
        "OMPI_MCA_btl_sm_backing_directory": str(scratch),
    }


def enter_private_network(scratch: Path) -> None:
    """Moves this process, which must have one thread, into a network with loopback alone.

    Processes that it starts are in the network too. Root may do so. Other users do it in a user
    namespace, in which they keep their user's and group's number and gain no rights. Not every
    system allows that.

    Args:
        scratch: an empty folder. Files that these processes write there are in memory, and nobody
            else sees them.

    Raises:
        OSError: this is not possible here. The process should not go on, since some of the steps
            may be done.
    """
    user = os.geteuid()
    group = os.getegid()
    flags = _CLONE_NEWNET | _CLONE_NEWNS
    if user:
        flags |= _CLONE_NEWUSER
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:
        # The kernel wants this before gid_map.
        Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="utf-8")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="utf-8")
    # Mounts of other namespaces appear here, and mounts of this one nowhere else.
    if libc.mount(b"none", b"/", None, _MS_SLAVE | _MS_REC, None):
        raise OSError(ctypes.get_errno(), "mount")
    folder = os.fsencode(scratch)
    if libc.mount(b"tmpfs", folder, b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=0700"):
        raise OSError(ctypes.get_errno(), "mount")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _UP_AND_RUNNING))


def network_of(pid: int) -> dict[str, int]:
    """Opens the network of a process on this machine.

    Returns:
        File descriptors of the network's namespaces, by kind. The network exists as long as they
        are open.

    Raises:
        OSError: the process is gone, or another user's.
    """
    return {
        kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        for kind in ("user", "net")
    }


def enter_network(namespaces: Mapping[str, int]) -> None:
    """Moves this process, which must have one thread, into namespaces such as `network_of` opens.

    Args:
        namespaces: file descriptors by kind, in the order in which they are entered. A namespace
            that the process is in already is passed over.

    Raises:
        OSError: this process may not enter it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, namespace in namespaces.items():
        if os.stat(f"/proc/self/ns/{kind}").st_ino != os.fstat(namespace).st_ino:
            if libc.setns(namespace, 0):
                raise OSError(ctypes.get_errno(), f"setns to a {kind} namespace")
