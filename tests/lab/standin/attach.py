"""exec and enter: a few checks, then the process becomes lxc-attach."""

import os

from standin.commandline import Die
from standin.containers import PERL_MODULE, load, running


def attach(vmid, keep_env, command, env):
    """Become lxc-attach, after the checks and with the environment of the real program."""
    for name in ("ENV", "BASH_ENV", "CDPATH", "IFS"):
        if name.encode() in env:
            raise Die(f"Insecure $ENV{{{name}}} while running with -T switch at {PERL_MODULE} line 253.")
    env = {name: value for name, value in env.items() if name not in (b"SSL_CERT_FILE", b"SSL_CERT_DIR")}
    env[b"PATH"] = b"/sbin:/bin:/usr/sbin:/usr/bin"
    flag = b"--keep-env" if keep_env else b"--clear-env"
    os.execve("/run/lab/lxc-attach", [b"lxc-attach", b"-n", vmid.encode(), flag, *command], env)


def must_run(vmid):
    load(vmid)
    if vmid not in running():
        raise Die(f"container '{vmid}' not running!")


def execute(values, env):
    must_run(values["vmid"])
    if not values["extra-args"]:
        raise Die(f"missing command at {PERL_MODULE} line 246.")
    attach(values["vmid"], values.get("keep-env", True), [b"--", *values["extra-args"]], env)


def enter(values, env):
    must_run(values["vmid"])
    attach(values["vmid"], values.get("keep-env", True), [], env)
