"""start, stop, shutdown and reboot, over lxc-start and lxc-stop."""

# importing pathlib would add 10 ms to every call
# ruff: noqa: PTH103, PTH123

import os
import re
import select
import socket
import subprocess
import time

from standin.commandline import Die, say
from standin.containers import LXC_DIR, TaskError, check_lock, load, lock_config, running, worker

STDERR_DIR = "/run/pve"
PRESTART = "/usr/local/sbin/lab-prestart"


def options_of(value):
    """`vmbr0,name=eth0` -> {"": "vmbr0", "name": "eth0"}: Proxmox's way to write several things on one line."""
    parts = (part.partition("=") for part in value.split(","))
    return {name if separator else "": text if separator else name for name, separator, text in parts}


def mount_point(value):
    """An `mpN:` of a folder or file of the node, as LXC has it."""
    given = options_of(value)
    kind = "file" if os.path.isfile(given[""]) else "dir"  # noqa: PTH113
    flags = f"rbind,create={kind}" + (",ro" if given.get("ro") == "1" else "")
    return f"lxc.mount.entry = {given['']} {given['mp'].lstrip('/')} none {flags} 0 0"


def network(number, value):
    given = options_of(value)
    facts = {"type": "veth", "link": given["bridge"], "name": given["name"], "flags": "up"}
    facts.update({"ipv4.address": given["ip"]} if "ip" in given else {})
    return [f"lxc.net.{number}.{key} = {text}" for key, text in facts.items()]


def write_lxc_config(vmid, conf):
    os.makedirs(f"{LXC_DIR}/{vmid}/rootfs", exist_ok=True)
    lines = ["lxc.include = /usr/share/lxc/config/common.conf"]
    if conf.get("unprivileged") == "1":
        lines += [
            "lxc.include = /usr/share/lxc/config/userns.conf",
            "lxc.mount.auto = sys:mixed",
            "lxc.idmap = u 0 100000 65536",
            "lxc.idmap = g 0 100000 65536",
        ]
    lines += [
        "lxc.apparmor.profile = unconfined",
        "lxc.cgroup.relative = 0",
        f"lxc.cgroup.dir.monitor = lxc.monitor/{vmid}",
        f"lxc.cgroup.dir.container = lxc/{vmid}",
        "lxc.cgroup.dir.container.inner = ns",
        "lxc.monitor.unshare = 1",
        "lxc.tty.max = 2",
        "lxc.environment = TERM=linux",
        "lxc.mount.entry = shm dev/shm tmpfs rw,nosuid,nodev,create=dir 0 0",
        f"lxc.uts.name = {conf.get('hostname', 'CT' + vmid)}",
        f"lxc.rootfs.path = {LXC_DIR}/{vmid}/rootfs",
        f"lxc.init.cmd = {conf.get('entrypoint', '/sbin/init')}",
        f"lxc.hook.pre-start = {PRESTART}",
    ]
    lines += [mount_point(value) for key, value in sorted(conf.items()) if re.fullmatch(r"mp\d+", key)]
    nets = {key[3:]: value for key, value in conf.items() if re.fullmatch(r"net\d+", key)}
    lines += ["lxc.net.0.type = empty"] if not nets else []
    lines += [line for number, value in nets.items() for line in network(number, value)]
    lines += [f"{key} = {value}" for key, value in conf.items() if key.startswith("lxc.")]
    with open(f"{LXC_DIR}/{vmid}/config", "w") as file:
        file.write("\n".join(lines) + "\n")


def start_container(vmid):
    write_lxc_config(vmid, load(vmid))
    os.makedirs(STDERR_DIR, exist_ok=True)
    with open(f"{STDERR_DIR}/ct-{vmid}.stderr", "w+", errors="replace") as errors:
        monitor = subprocess.Popen(
            ["lxc-start", "-F", "-n", vmid], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            start_new_session=True, cwd="/",
        )  # fmt: skip
        give_up_at = time.monotonic() + 10
        while monitor.poll() is None and vmid not in running() and time.monotonic() < give_up_at:
            time.sleep(0.005)
        wait = subprocess.Popen(
            ["lxc-wait", "-n", vmid, "-s", "RUNNING", "-t", "10"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while wait.poll() is None and monitor.poll() is None:
            time.sleep(0.005)
        if wait.poll() == 0 and monitor.poll() is None:
            return
        wait.kill()
        errors.seek(0)
        for line in errors:
            say(re.sub(rf"^\s*lxc-start:?\s+{vmid}:?\s*\S+\s*", "", line.rstrip("\n")))
    raise TaskError(f"startup for container '{vmid}' failed")


def stop_container(vmid, flags, timeout_s):
    """lxc-stop, then wait until the monitor is gone, which closes its command socket."""
    monitor = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        monitor.connect(f"\0{LXC_DIR}/{vmid}/command")
    except ConnectionRefusedError:
        return
    command = ["lxc-stop", "-n", vmid, *flags]
    if timeout_s is not None:
        command += ["--timeout", str(timeout_s)]
        timeout_s += 5
    try:
        code = subprocess.run(command, timeout=timeout_s).returncode
        why = f"exit code {code}"
    except subprocess.TimeoutExpired:
        code, why = 1, "got timeout"
    if code:
        say(f"command '{' '.join(command)}' failed: {why}")
    if select.select([monitor], [], [], timeout_s if code else None)[0] and not monitor.recv(1):
        return
    raise TaskError("container did not stop")


def lifecycle(values, what, task, *args):
    """Run `task` under the configuration lock if the container runs. `what` is the word real pct uses for it."""
    vmid = values["vmid"]
    if vmid not in running():
        raise Die(f"{what} {vmid} not running")

    def locked():
        lock_config(vmid)
        task(vmid, *args)

    if not worker(locked):
        raise Die("")


def stop_unlocked(vmid, flags, timeout_s):
    check_lock(load(vmid))
    stop_container(vmid, flags, timeout_s)


def stop_and_start(vmid, timeout_s):
    # `lock:` is not looked at: recorded so
    stop_container(vmid, [], timeout_s)
    start_container(vmid)


def start(values, _env):
    vmid = values["vmid"]
    if vmid in running():
        raise Die(f"CT {vmid} already running")

    def locked():
        lock_config(vmid)
        check_lock(load(vmid))
        start_container(vmid)

    if not worker(locked):
        raise Die("")


def stop(values, _env):
    lifecycle(values, "CT", stop_unlocked, ["--kill"], None)


def shutdown(values, _env):
    flags = [] if values.get("forceStop") else ["--nokill"]
    lifecycle(values, "CT", stop_unlocked, flags, int(values.get("timeout", 60)))


def reboot(values, _env):
    lifecycle(values, "VM", stop_and_start, int(values["timeout"]) if "timeout" in values else None)
