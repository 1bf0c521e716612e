"""A private network for a job on this machine: a network namespace that has loopback and nothing else.

mpirun opens control ports on all interfaces, and horovodrun an HTTP store, and neither can be told otherwise. What
listens in there is reached by the job's own processes alone.

And a folder in memory that only the job sees, for what starters and MPI keep in files: the kernel removes it with the
job's last process, however that ends. They cannot when they are killed: mpirun's files in the temporary folder would
then end the next mpirun that is given its process number, and MPI's shared memory would stay until the next boot. All
other files, and processes, are this machine's.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Mapping
from fcntl import ioctl
from pathlib import Path

from hvdtrain.config import recipes
from hvdtrain.config.run_config import RunConfig
from hvdtrain.system.own_code import is_code

# Of linux/sched.h, sys/mount.h, linux/sockios.h and linux/if.h.
_NEW_MOUNT_NAMESPACE, _NEW_USER_NAMESPACE, _NEW_NETWORK_NAMESPACE = 0x00020000, 0x10000000, 0x40000000
_NO_SUID, _NO_DEVICES, _RECURSIVELY, _TAKE_OTHERS_MOUNTS = 0x2, 0x4, 0x4000, 0x80000
_SET_INTERFACE_FLAGS, _UP_AND_RUNNING = 0x8914, 0x41
# Sources of images that never need the network; see data/sources/.
_WITHOUT_DOWNLOAD = {"digits", "turntable"}


def needs_network(config: RunConfig) -> bool:
    """Whether the ranks of a job read from a URL, or may have to download something first, as a user's code may."""
    from hvdtrain.data.build import is_built
    from hvdtrain.data.find import is_url
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
    """What has mpirun and MPI keep their files in this folder; for enter_private_network's."""
    return {"PRTE_MCA_prte_tmpdir_base": str(scratch), "OMPI_MCA_btl_sm_backing_directory": str(scratch)}


def enter_private_network(scratch: Path) -> None:
    """Give this process, which must have one thread, a network with loopback alone, and what it starts too.

    Root may do so. Others do it in a user namespace, in which they keep their user's and group's number and gain no
    rights; not every system allows that.

    Args:
        scratch: an empty folder; what these processes write there, in memory, nobody else sees.

    Raises:
        OSError: this is not possible here, and the process should not go on, since it may be half way.
    """
    user, group = os.geteuid(), os.getegid()
    flags = _NEW_NETWORK_NAMESPACE | _NEW_MOUNT_NAMESPACE | (_NEW_USER_NAMESPACE if user else 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")  # the kernel wants this before gid_map
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    for source, folder, kind, how, options in (
        (b"none", b"/", None, _TAKE_OTHERS_MOUNTS | _RECURSIVELY, None),  # and give nobody this one
        (b"tmpfs", os.fsencode(scratch), b"tmpfs", _NO_SUID | _NO_DEVICES, b"mode=0700"),
    ):
        if libc.mount(source, folder, kind, how, options):
            raise OSError(ctypes.get_errno(), "mount")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        ioctl(any_socket, _SET_INTERFACE_FLAGS, struct.pack("16sH22x", b"lo", _UP_AND_RUNNING))


def network_of(pid: int) -> dict[str, int]:
    """File descriptors of the namespaces, by kind, that make the network of a process on this machine: it is there for
    as long as they are open.

    Raises:
        OSError: the process is gone, or another user's.
    """
    return {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("user", "net")}


def enter_network(namespaces: Mapping[str, int]) -> None:
    """Give this process, which must have one thread, the network of `network_of`.

    Raises:
        OSError: it may not be entered.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, namespace in namespaces.items():
        if os.stat(f"/proc/self/ns/{kind}").st_ino != os.fstat(namespace).st_ino:
            if libc.setns(namespace, 0):
                raise OSError(ctypes.get_errno(), f"setns to a {kind} namespace")
