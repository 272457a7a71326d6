"""What the node knows of its containers: configuration files, LXC's sockets, locks; and the commands that look."""

# importing pathlib would add 10 ms to every call
# ruff: noqa: PTH103, PTH105, PTH123, PTH208

import fcntl
import os
import re
import subprocess
import sys
import time

from standin.commandline import Die, say

NODE = os.uname().nodename.split(".")[0]
CONF_DIR = f"/etc/pve/nodes/{NODE}/lxc"
LXC_DIR = "/var/lib/lxc"
LOCK_DIR = "/run/lock/lxc"
PERL_MODULE = "/usr/share/perl5/PVE/CLI/pct.pm"


class TaskError(Exception):
    """An error inside a worker task: its text on stderr. Push and pull then exit 0 all the same, others 255."""


def load(vmid):
    """The configuration as {key: value}. Raises Die if this node has none."""
    try:
        with open(f"{CONF_DIR}/{vmid}.conf") as file:
            lines = file.read().split("\n[", 1)[0].splitlines()
    except FileNotFoundError:
        raise Die(f"Configuration file 'nodes/{NODE}/lxc/{vmid}.conf' does not exist", 2) from None
    matches = (re.match(r"([a-z][\w.]*?):\s*(.+?)\s*$", line) for line in lines)
    return {match.group(1): match.group(2) for match in matches if match}


def save(vmid, conf):
    aside = f"{CONF_DIR}/{vmid}.conf.tmp.{os.getpid()}"
    with open(aside, "w") as file:
        file.writelines(f"{key}: {value}\n" for key, value in sorted(conf.items()))
    os.replace(aside, f"{CONF_DIR}/{vmid}.conf")


def running():
    """The vmids whose LXC monitor listens. A frozen container is among them."""
    with open("/proc/net/unix") as file:
        return set(re.findall(rf"@{LXC_DIR}/(\d+)/command$", file.read(), re.M))


def init_pid(vmid):
    done = subprocess.run(["lxc-info", "-n", vmid, "-p", "-H"], capture_output=True, text=True)
    if not done.stdout.strip().isdigit():
        raise TaskError(f"unable to get PID for CT {vmid} (not running?)")
    return int(done.stdout)


def lock_config(vmid, timeout_s=10):
    """Take the container's configuration lock for the life of this process."""
    os.makedirs(LOCK_DIR, exist_ok=True)
    path = f"{LOCK_DIR}/pve-config-{vmid}.lock"
    fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    give_up_at = time.monotonic() + timeout_s
    waited = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waited:
                say("trying to acquire lock...")
            elif time.monotonic() > give_up_at:
                raise Die(f"can't lock file '{path}' - got timeout", 4) from None
            waited = True
            time.sleep(0.05)
        else:
            if waited:
                say(" OK")
            return


def check_lock(conf):
    if conf.get("lock"):
        raise TaskError(f"CT is locked ({conf['lock']})")


def worker(task, *args):
    """Run a task in a child, as PVE does in the foreground; whether it succeeded."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            task(*args)
            code = 0
        except (TaskError, Die) as error:
            say(str(error).rstrip("\n").replace("\n", " "))
        except Exception:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def list_all(_values, _env):
    try:
        vmids = sorted(int(name[:-5]) for name in os.listdir(CONF_DIR) if re.fullmatch(r"\d+\.conf", name))
    except FileNotFoundError:
        vmids = []
    row = "{:<10} {:<10} {:<12} {:<20}".format
    alive = running()
    for number, vmid in enumerate(vmids):
        if number == 0:
            print(row("VMID", "Status", "Lock", "Name"))
        conf = load(str(vmid))
        state = "running" if str(vmid) in alive else "stopped"
        print(row(vmid, state, conf.get("lock", ""), conf.get("hostname", f"CT{vmid}").replace(" ", "")))


def status(values, _env):
    vmid = values["vmid"]
    conf = load(vmid)
    state = "running" if vmid in running() else "stopped"
    if not values.get("verbose"):
        print(f"status: {state}")
        return
    facts = dict.fromkeys(["disk", "diskread", "diskwrite", "mem", "netin", "netout", "swap", "uptime"], 0)
    facts.update(
        cpus=conf.get("cores") or os.cpu_count(), maxdisk=4 << 30, maxmem=int(conf.get("memory", 512)) << 20,
        maxswap=int(conf.get("swap", 0)) << 20, name=conf.get("hostname", f"CT{vmid}"), status=state, type="lxc",
        vmid=vmid,
    )  # fmt: skip
    if conf.get("lock"):
        facts["lock"] = conf["lock"]
    if state == "running":
        pid = init_pid(vmid)
        disk = os.statvfs(f"/proc/{pid}/root")
        with open(f"/proc/{pid}/stat") as stat, open("/proc/uptime") as uptime:
            started_s = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
            facts["uptime"] = int(float(uptime.read().split()[0]) - started_s)
        facts.update(pid=pid, maxdisk=disk.f_blocks * disk.f_frsize)
        facts["disk"] = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    for key in sorted(facts):
        print(f"{key}: {facts[key]}")


def config(values, _env):
    conf = load(values["vmid"])
    for key in sorted(key for key in conf if not key.startswith("lxc.")):
        print(f"{key}: {conf[key]}")
    for key in (key for key in conf if key.startswith("lxc.")):
        print(f"{key}: {conf[key]}")


def unlock(values, _env):
    vmid = values["vmid"]
    lock_config(vmid)
    conf = load(vmid)
    if not conf.pop("lock", None):
        raise Die("no lock found trying to remove any lock")
    save(vmid, conf)
