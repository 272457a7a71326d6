"""The lab: a Proxmox node on this machine's loopback, with real LXC containers, for tests and for play.

A node is one process tree in namespaces of its own (`node-init`): a real sshd on a free port, the `pct` stand-in, and
containers that are overlays over one small root image, made once and cached. When its first process ends, the kernel
ends everything of it; its cgroup and its folder are removed by `down`, or by the next `up` after a crash. So labs run
beside each other, with the same vmids, and leave nothing. Standard library only; needs root.

    python tests/lab/lab.py setup | up | ct VMID [KEY=VALUE ...] | down
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("SPECCTL_LAB_CACHE") or "/var/tmp/specctl-lab/cache")
RUNS = CACHE.parent / "run"
PLAY = "play"
USER = "labuser"
"""A login of the node that is not root, with the same key."""
"""The run of the command line, which outlives the command."""

TOOLS = {  # what must be there -> the Debian package it comes from
    "lxc-start": "lxc",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "mmdebstrap": "mmdebstrap",
    "newuidmap": "uidmap",
    "sudo": "sudo",
    "fish": "fish",
    "ip": "iproute2",
    "/usr/bin/python3": "python3",
}
SUITE = "bookworm"
CONTAINER_PACKAGES = ["python3", "tmux", "procps", "tini", "grep", "systemd-sysv", "libpam-systemd"]
RECIPE = [
    "--variant=minbase",
    f"--include={','.join(CONTAINER_PACKAGES)}",
    *(f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale")),
    '--customize-hook=rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*',
    SUITE,
]
IMAGE = f"root-{hashlib.sha256(' '.join(RECIPE).encode()).hexdigest()[:8]}"
CONTAINER = {
    "arch": "amd64",
    "cores": "1",
    "entrypoint": "/usr/bin/tini -s -- /usr/bin/sleep infinity",
    "memory": "512",
    "ostype": "debian",
    "rootfs": f"lab:{IMAGE},size=4G",
    "swap": "0",
}
SHIFT = 100_000
"""Where the node maps root of an unprivileged container to."""
SSHD_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey /run/lab/run/ssh/host_key
PidFile /run/lab/sshd.pid
AuthorizedKeysFile /run/lab/run/ssh/authorized_keys
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM yes
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp /usr/lib/openssh/sftp-server
"""
SSH_CONFIG = """\
Host {node}
  HostName 127.0.0.1
  Port {port}
  User root
  IdentityFile {run}/ssh/id
  IdentitiesOnly yes
  UserKnownHostsFile {run}/ssh/known_hosts
  StrictHostKeyChecking yes
  BatchMode yes
  LogLevel ERROR
"""


class LabUnavailable(Exception):
    """This machine or this user cannot have a lab; the message says why and what to do."""


# --- what a lab needs -----------------------------------------------------------------------------------------------


def find_tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def setup(*, install: bool = True) -> None:
    """Make sure of root, packages and root image. With `install` False, missing packages are an error."""
    if os.geteuid() != 0:
        raise LabUnavailable("the lab needs root, for containers and mounts: run it with sudo, or in a root container")
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / "setup.lock"):
        missing = sorted({package for tool, package in TOOLS.items() if not find_tool(tool)})
        if missing and not install:
            raise LabUnavailable(f"missing: {', '.join(missing)}; run: python tests/lab/lab.py setup")
        if missing:
            quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            install_argv = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing]
            step(["apt-get", "update", "-qq"], f"cannot install {', '.join(missing)}", env=quiet)
            step(install_argv, f"cannot install {', '.join(missing)}", env=quiet)
        if not (CACHE / IMAGE).is_dir():
            aside = CACHE / f"{IMAGE}.tmp"
            shutil.rmtree(aside, ignore_errors=True)
            step(["mmdebstrap", "--quiet", *RECIPE[:-1], SUITE, str(aside)], "cannot make the containers' root image")
            aside.rename(CACHE / IMAGE)


def shifted_image() -> str:
    """The root image with its owners moved to where an unprivileged container's are; made at the first need."""
    name = f"{IMAGE}-shifted"
    with locked(CACHE / "setup.lock"):
        if not (CACHE / name).is_dir():
            aside = CACHE / f"{name}.tmp"
            shutil.rmtree(aside, ignore_errors=True)
            step(["cp", "-a", "--reflink=auto", str(CACHE / IMAGE), str(aside)], "cannot copy the root image")
            for path in [aside, *aside.rglob("*")]:
                seen = path.lstat()
                os.lchown(path, seen.st_uid + SHIFT, seen.st_gid + SHIFT)
                if not path.is_symlink():  # a change of owner has taken the setuid bits
                    path.chmod(seen.st_mode & 0o7777)
            aside.rename(CACHE / name)
    return name


def step(argv: list[str], what: str, env: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", env=env)
    except FileNotFoundError:
        raise LabUnavailable(f"{what}: {argv[0]} is not on this machine (the lab is made for Debian)") from None
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).strip()[-800:]
        raise LabUnavailable(f"{what}: `{' '.join(argv[:3])} ...` exited {done.returncode}: {tail}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wait_until(condition: object, what: str, *, timeout_s: float = 10.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"lab: {what}: not within {timeout_s:g} s")
        time.sleep(0.01)


# --- one lab --------------------------------------------------------------------------------------------------------


class Lab:
    """One node and its containers. `with Lab() as lab:` is up inside and gone after."""

    def __init__(self, *, node: str = "pve", name: str | None = None):
        self.node = node
        self._name = name
        self.run: Path = RUNS / (name or "not-up")
        self._holder: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Lab:
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.down()

    # the node

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`: the host `pve`, its key, and known_hosts with its host key."""
        return self.run / "ssh" / "ssh_config"

    @property
    def root(self) -> Path:
        """The node's own file tree, as seen from outside."""
        return Path(f"/proc/{self._init_pid()}/root")

    def up(self, *, keep: bool = False) -> Lab:
        """Start the node. It ends with this process, unless `keep`: then only `down` ends it."""
        setup(install=False)
        RUNS.mkdir(parents=True, exist_ok=True)
        with locked(RUNS / ".lock"):
            sweep()
            if self._name and self.run.exists():
                raise LabUnavailable(f"a lab runs already in {self.run}; first: python tests/lab/lab.py down")
            self.run = self.run if self._name else Path(tempfile.mkdtemp(prefix="lab-", dir=RUNS))
            self.run.mkdir(exist_ok=True)
            self.run.chmod(0o755)
            lock = (self.run / "lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with lock:
                for attempt in range(3):
                    if self._start_node(lock.fileno(), keep=keep, last=attempt == 2):
                        break
        except BaseException:
            self.down()
            raise
        return self

    def _start_node(self, lock_fd: int, *, keep: bool, last: bool) -> bool:
        """Whether it started; False if another program took the port meanwhile and this is not the last try."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._write_run(port)
        unshare = ["unshare", "--mount", "--propagation", "private", "--uts", "--pid", "--fork", "--kill-child"]
        init = [HERE / "node-init", self.run, self.node, cgroup_of(self.run), CACHE, USER, "keep" if keep else ""]
        log = self.run / "node.log"
        with log.open("wb") as output:
            # the lock is inherited by the node's first process: whoever can take it knows that the node is gone
            self._holder = subprocess.Popen(
                [*unshare, "--", *map(str, init)], stdin=subprocess.DEVNULL if keep else subprocess.PIPE,
                stdout=output, stderr=output, pass_fds=[lock_fd], start_new_session=True, cwd="/",
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            )  # fmt: skip
        holder, ready = self._holder, self.run / "init.pid"
        wait_until(lambda: ready.exists() or holder.poll() is not None, "the node did not start")
        if ready.exists():
            return True
        sshd_log = self.run / "ssh" / "sshd.log"
        why = log.read_text(errors="replace") + (sshd_log.read_text(errors="replace") if sshd_log.exists() else "")
        if "Address already in use" in why and not last:
            holder.wait()
            if holder.stdin:
                holder.stdin.close()
            remove_cgroup(self.run)
            return False
        raise LabUnavailable(f"the node did not start (are mounts and namespaces allowed here?): {why.strip()[-800:]}")

    def _write_run(self, port: int) -> None:
        ssh, sbin = self.run / "ssh", self.run / "sbin"
        for folder in (ssh, sbin, self.run / "ct"):
            folder.mkdir(exist_ok=True)
        for key in ("host_key", "id"):
            if not (ssh / key).exists():
                subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", ssh / key], check=True)
        shutil.copy(ssh / "id.pub", ssh / "authorized_keys")
        host_key = " ".join((ssh / "host_key.pub").read_text().split()[:2])
        (ssh / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}\n")
        (ssh / "sshd_config").write_text(SSHD_CONFIG.format(port=port))
        self.ssh_config.write_text(SSH_CONFIG.format(node=self.node, port=port, run=self.run))
        for program in ("pct", "lab-prestart", "node-shell"):
            shutil.copy(HERE / program, sbin / program)
        shutil.copytree(HERE / "standin", sbin / "standin", ignore=shutil.ignore_patterns("*.pyc"), dirs_exist_ok=True)

    def down(self) -> None:
        """End the node with all its processes, and remove what is left of it. Nothing to do is fine."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, LabUnavailable):
            os.kill(self._init_pid(), signal.SIGKILL)
        if self._holder:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it ends by itself once it has reaped the node
                self._holder.wait(timeout=5 if (self.run / "init.pid").exists() else 0)
            self._holder.kill()
            self._holder.wait()
            if self._holder.stdin:
                self._holder.stdin.close()
            self._holder = None
        if not self.run.exists():
            return
        wait_until(lambda: is_abandoned(self.run), f"the node of {self.run} did not end")
        with locked(RUNS / ".lock"):  # another lab that comes up may be sweeping it away
            if self.run.exists():
                destroy(self.run)

    def _init_pid(self) -> int:
        """The node's first process, as this machine counts. Raises LabUnavailable when the node is not up."""
        try:
            with (self.run / "lock").open() as lock:
                if try_lock(lock.fileno()):
                    raise LabUnavailable(f"the node of {self.run} is gone; start it with: python tests/lab/lab.py up")
            return int((self.run / "init.pid").read_text())
        except FileNotFoundError:
            raise LabUnavailable("no lab is up; start it with: python tests/lab/lab.py up") from None

    def on_node(self, argv: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run a command on the node without ssh. Keywords are those of subprocess.run."""
        pid = self._init_pid()
        # into the node's cgroup first: from inside its cgroup namespace a process of outside may not be moved
        enter = f'echo 0 >/proc/{pid}/root/sys/fs/cgroup/init.scope/cgroup.procs; exec "$@"'
        spaces = ["--mount", "--uts", "--pid", "--cgroup", f"--net=/proc/{pid}/root/run/lab/net"]
        command = ["sh", "-c", enter, "sh", "nsenter", f"--target={pid}", *spaces, "--", *argv]
        options: dict[str, object] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "cwd": "/"}
        if "input" in kwargs:
            del options["stdin"]
        return subprocess.run(command, **{**options, **kwargs})  # type: ignore[call-overload, no-any-return]

    def _must(self, argv: list[str]) -> None:
        done = self.on_node(argv)
        if done.returncode != 0:
            why = done.stderr.strip()
            raise RuntimeError(f"lab: `{' '.join(argv)}` on {self.node} exited {done.returncode}: {why}")

    def set_pct_cost(self, cpu_s: float) -> None:
        """Let every `pct` call cost this much CPU time; the real one costs 0.48 s, the stand-in alone 0.05 s."""
        (self.root / "etc/pve/.lab-pct-cpu-s").write_text(f"{cpu_s}\n")

    def set_sudo(self, rule: str) -> None:
        """Let sudo on the node know this one rule, none if it is empty. Raises RuntimeError if it is no rule."""
        path = "/etc/sudoers.d/specctl"
        self._must(["sh", "-ec", f'umask 337; rm -f {path}; printf "%s\\n" "$1" >{path}; visudo -cq', "sh", rule])

    # containers

    def define(self, vmid: int, **conf: str) -> None:
        """Write a container's configuration; keys are those of Proxmox, `rootfs` and `entrypoint` included."""
        keys = {"hostname": f"ct{vmid}", **CONTAINER, **conf}
        if conf.get("unprivileged") == "1":
            keys["rootfs"] = f"lab:{shifted_image()},size=4G"
        path = self.root / f"etc/pve/nodes/{self.node}/lxc/{vmid}.conf"
        path.write_text("".join(f"{key}: {value}\n" for key, value in sorted(keys.items())))
        path.chmod(0o640)  # as pmxcfs shows it: to root and www-data

    def undefine(self, vmid: int) -> None:
        """Remove a stopped container's configuration. Its files stay, for a container of the same number."""
        (self.root / f"etc/pve/nodes/{self.node}/lxc/{vmid}.conf").unlink()

    def container(self, vmid: int, **conf: str) -> None:
        """Define and start a container."""
        self.define(vmid, **conf)
        self.start(vmid)

    def start(self, vmid: int) -> None:
        self._must(["pct", "start", str(vmid)])

    def stop(self, vmid: int) -> None:
        self._must(["pct", "stop", str(vmid)])

    def reboot(self, vmid: int) -> None:
        self._must(["pct", "reboot", str(vmid)])

    def freeze(self, vmid: int) -> None:
        self._must(["lxc-freeze", "-n", str(vmid)])

    def thaw(self, vmid: int) -> None:
        self._must(["lxc-unfreeze", "-n", str(vmid)])

    def inside(self, vmid: int, argv: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, past ssh and pct. Keywords are those of subprocess.run."""
        return self.on_node(["lxc-attach", "-n", str(vmid), "--clear-env", "--", *argv], **kwargs)

    def clock(self, vmid: int, offset: str = "+0s") -> None:
        """Let the container's wall clock be off by so many `s`, `m`, `h` or `d`, from now on: `+3600s`, `-2h`.

        It is the clock of its Pythons, so of specctl's agent and supervisor, and jumps at once in those that started
        after the first call. All files' times jump along, as if written since; the monotonic clock and boot time stay.
        """
        offset_s = int(offset[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[offset[-1]]
        script = (
            "for f in /usr/lib/python3.*/encodings/__init__.py; do grep -q lab-clock $f || cat >>$f; done; "
            "echo $1 >/etc/lab-clock.new; mv /etc/lab-clock.new /etc/lab-clock"
        )
        self.inside(vmid, ["sh", "-ec", script, "sh", str(offset_s)], input=(HERE / "clock.py").read_text(), check=True)

    def clear(self, vmid: int, workdir: str) -> None:
        """End everything in a container but its init, and remove `workdir`: as if nobody had been there."""
        script = (
            "for p in /proc/[0-9]*; do n=${p#/proc/}; [ $n = 1 ] || [ $n = $$ ] || "
            "tr '\\0' ' ' <$p/cmdline | grep -q 'sleep infinity' || kill -9 $n; done 2>/dev/null; rm -rf \"$1\""
        )
        self.inside(vmid, ["sh", "-c", script, "sh", workdir])

    def vmids(self) -> list[int]:
        folder = self.root / f"etc/pve/nodes/{self.node}/lxc"
        return sorted(int(path.stem) for path in folder.glob("*.conf"))

    def hosts_yaml(self, *, workdir: str = "/workspace/specctl") -> str:
        """An inventory with one target for each container: `ct101`, ..."""
        lines = ["targets:"]
        lines += [f"  ct{vmid}: {{ssh: {self.node}, vmid: {vmid}, workdir: {workdir}}}" for vmid in self.vmids()]
        return "\n".join(lines) + "\n"


# --- what is left of a lab ------------------------------------------------------------------------------------------


def try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_abandoned(run: Path) -> bool:
    """Whether the node's processes have let go of its lock. One that is exiting has no command line any more, but
    still its open files: looking for its command line would call the node gone too early."""
    try:
        with (run / "lock").open() as lock:
            return try_lock(lock.fileno())
    except FileNotFoundError:  # swept, or its maker died before it had one
        return True


def cgroup_of(run: Path) -> str:
    return f"specctl-lab-{run.name}"


def remove_cgroup(run: Path) -> None:
    """Remove the node's cgroups. They are gone from use once its processes are, which can take a moment."""
    script = (
        'mount -t cgroup2 cgroup2 /sys/fs/cgroup; cd /sys/fs/cgroup; [ ! -e "$1" ] || '
        'find "$1" -depth -type d -exec rmdir {} + 2>/dev/null; [ ! -e "$1" ]'
    )
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", cgroup_of(run)]
    wait_until(lambda: subprocess.run(argv).returncode == 0, f"cgroup {cgroup_of(run)} stays in use")


def destroy(run: Path) -> None:
    """Remove the cgroups and files of a node that is gone. The caller holds RUNS/.lock."""
    remove_cgroup(run)
    shutil.rmtree(run)


def sweep() -> None:
    """Destroy what crashed labs left: their lock is free. The caller holds RUNS/.lock."""
    for run in RUNS.iterdir():
        if run.is_dir() and is_abandoned(run):
            destroy(run)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="lab.py", description="A Proxmox node with real containers on loopback.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="setup|up|ct|down")
    verbs.add_parser("setup", help="install what is missing (apt) and make the containers' root image")
    verbs.add_parser("up", help="start the node, and leave it running")
    ct = verbs.add_parser("ct", help="add a container to the node and start it")
    ct.add_argument("vmid", type=int)
    ct.add_argument("conf", nargs="*", metavar="KEY=VALUE", help="lines of its configuration")
    verbs.add_parser("down", help="end the node and everything in it")
    args = parser.parse_args(argv)
    lab = Lab(name=PLAY)
    try:
        if args.verb in ("setup", "up"):
            setup()
        if args.verb == "up":
            lab.up(keep=True)
            print(f"ssh -F {lab.ssh_config} {lab.node} pct list")
        elif args.verb == "ct":
            lab.container(args.vmid, **dict(pair.split("=", 1) for pair in args.conf))
            print(f"ssh -F {lab.ssh_config} {lab.node} pct exec {args.vmid} -- ps ax")
        elif args.verb == "down":
            lab.down()
    except (LabUnavailable, RuntimeError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
