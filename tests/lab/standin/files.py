"""push and pull, with their silence about failures: only the text on stderr may tell, the exit code is 0."""

# importing pathlib would add 10 ms to every call
# ruff: noqa: PTH123

import ctypes
import os

from standin.commandline import Die
from standin.containers import PERL_MODULE, TaskError, init_pid, lock_config, running, worker

CLONE_NEWNS = 0x20000


def ids_of(values):
    """(uid, gid) for the new file, -1 where not asked for, by the passwd and group files of the current root."""

    def look_up(name, path, what):
        if name is None or name.isdigit():
            return -1 if name is None else int(name)
        with open(path) as file:
            fields = [line.split(":") for line in file]
        ids = [int(field[2]) for field in fields if field[0] == name]
        if not ids:
            raise TaskError(f"failed to get {what} for: {name}")
        return ids[0]

    uid = look_up(values.get("user"), "/etc/passwd", "uid")
    return uid, look_up(values.get("group"), "/etc/group", "gid")


def create_file(path, values):
    """A descriptor to write to. A file that exists is emptied in place, and keeps owner and mode unless told."""
    uid, gid = ids_of(values)
    mode = None
    if values.get("perms") is not None:
        digits = values["perms"] if values["perms"].startswith("0") else "0" + values["perms"]
        try:
            mode = int(digits, 16 if digits[:2].lower() == "0x" else 8)
        except ValueError:
            raise TaskError(f"invalid mode: '{digits}'") from None
    umask = os.umask(0)
    os.umask(umask)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0)
        mode = 0o666 & ~umask if mode is None else mode
    except OSError:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        except OSError as error:
            raise TaskError(f"failed to create file: {path}: {error.strerror}") from None
    if mode is not None:
        os.fchmod(fd, mode)
    if uid >= 0 or gid >= 0:
        os.fchown(fd, uid, gid)
    return fd


def copy_silently(source_fd, target_fd):
    """Copy until the end or the first error, and say nothing of it: a full disk leaves a part of the file."""
    try:
        while chunk := os.read(source_fd, 2 << 20):
            while chunk:
                chunk = chunk[os.write(target_fd, chunk) :]
    except OSError:
        pass


def enter_container(vmid):
    """Move this process into the container's mount namespace, at its root."""
    fd = os.open(f"/proc/{init_pid(vmid)}/ns/mnt", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNS):
        raise TaskError(f"failed to enter the container's mount namespace: {os.strerror(ctypes.get_errno())}")
    os.close(fd)
    os.chdir("/")


def copy_in(values):
    try:
        source_fd = os.open(values["file"], os.O_RDONLY)
    except OSError:
        raise TaskError(f"failed to open {values['file']} for reading") from None
    enter_container(values["vmid"])
    copy_silently(source_fd, create_file(values["destination"], values))


def copy_out(values):
    # in this order, as the real one: a source that is missing still destroys the destination
    target_fd = create_file(values["destination"], values)
    enter_container(values["vmid"])
    try:
        source_fd = os.open(values["path"], os.O_RDONLY)
    except OSError as error:
        raise TaskError(f"failed to open {values['path']}: {error.strerror}") from None
    copy_silently(source_fd, target_fd)


def push(values, _env):
    lock_config(values["vmid"])
    if values["vmid"] not in running():
        raise Die("can only push files to a running CT")
    worker(copy_in, values)  # its failure changes nothing: the real program exits 0 too


def pull(values, _env):
    lock_config(values["vmid"])
    if values["vmid"] not in running():
        raise Die(f"can only pull files from a running VM at {PERL_MODULE} line 664.")
    worker(copy_out, values)
