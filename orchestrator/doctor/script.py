"""What the doctor runs on a target and on its node: plain POSIX sh that prints facts and judges nothing.

It needs no Python, writes nothing, and is content with busybox. Each fact is a line `TOKEN KEY VALUE`, so that what a
shell's start-up prints is none; `TOKEN at SECTION` goes before each part, so that the one that hangs is known by name.
"""

from __future__ import annotations

from orchestrator.agent.place import MODULES
from orchestrator.agent.system import PATH
from orchestrator.agent.tmux import CONDA
from orchestrator.ailments import SMI_QUERY
from orchestrator.transport.node import ENTER, LOOK, ON_NODE

SMI_S = 10
DISK_S = 5
PYTHON_S = 20
TORCH_S = 90
PROGRAMS = ("tmux", "python3", "grep", "gcc", "cc", "clang", "nvidia-smi", "sudo")
MANAGERS = ("apt-get", "apk", "dnf", "yum", "zypper", "pacman")
LOADS = ("LD_", "CUDA_", "NVIDIA_", "PYTORCH_", "PYTHON")
"""Beginnings of the variables of `env:` that decide what torch loads and sees. The others stay here: they may be
nobody's business, and an argument can be read by all."""

_TELL = r"""
tell() { printf '%s %s\n' "$T" "$*"; }
lines() { while IFS= read -r line || [ -n "$line" ]; do printf '%s %s %s\n' "$T" "$1" "$line"; done; }
bound() {
    if timeout -s KILL 5 true 2>/dev/null; then timeout -s KILL "$@"; else shift; "$@"; fi
}
"""

_TARGET = (
    _TELL
    + r"""
U=$1 W=$2 PY=$3 QUICK=$4 TORCH=$5 KEPT=$6
tell at who
tell now "$(date +%s)"
[ -n "$SPECCTL_BECAME" ] || tell login "$(id -un 2>/dev/null || id -u)"
if [ -n "$U" ] && [ -z "$SPECCTL_BECAME" ]; then
    name=$U
    case $U in *[!0-9]*) ;; *) name=$(grep "^[^:]*:[^:]*:$U:" /etc/passwd | head -n 1 | cut -d: -f1) ;; esac
    wanted=$(id -u "${name:-$U}" 2>/dev/null) || wanted=
    if [ -z "$wanted" ]; then
        tell user-missing "$U"
    elif [ "$wanted" != "$(id -u)" ] && [ "$(id -u)" != 0 ]; then
        tell user-other "$name"
    elif [ "$wanted" != "$(id -u)" ]; then
        SPECCTL_BECAME=1
        export SPECCTL_BECAME
        group=$(id -g "$name")
        set -- sh -c 'script=$1 T=$2; shift 2; eval "$script"' specctl-doctor "$script" "$T" "$@"
        if setpriv --reuid="$wanted" --regid="$group" --init-groups true 2>/dev/null; then
            exec setpriv --reuid="$wanted" --regid="$group" --init-groups "$@"
        fi
        words=
        for word; do words="$words '$(printf %s "$word" | sed "s/'/'\\\\''/g")'"; done
        exec su -s /bin/sh "$name" -c "exec $words"
    fi
fi
name=$(id -un 2>/dev/null || id -u)
tell uid "$(id -u)"
tell user "$name"
tell groups "$(id -Gn 2>/dev/null)"
home=$KEPT
[ -n "$home" ] && [ -z "$SPECCTL_BECAME" ] ||
    home=$( { getent passwd "$name" || grep "^$name:" /etc/passwd; } 2>/dev/null | head -n 1 | cut -d: -f6)
HOME=${home:-${HOME:-/}}
export HOME
state=
[ ! -d "$HOME" ] || state=directory
[ ! -w "$HOME" ] || state="$state writable"
tell home "$HOME"
tell home-is "$state"

tell at system
tell path "$PATH"
tell locale "${LC_ALL:-${LC_CTYPE:-${LANG:-none}}}"
PATH="$PATH:FOLDERS"
tell host "$(uname -n)"
tell kernel "$(uname -srm)"
(. /etc/os-release && tell system "$PRETTY_NAME") 2>/dev/null
for program in PROGRAMS; do tell program "$program $(command -v "$program")"; done
for program in MANAGERS; do command -v "$program" >/dev/null && tell manager "$program"; done

tell at limits
lines limits </proc/self/limits
lines meminfo </proc/meminfo
tell processors "$(nproc 2>/dev/null)"
walk() {
    base=$1 folder=$2
    shift 2
    while :; do
        for file; do [ ! -r "$base$folder/$file" ] || tell cgroup "$base$folder $file $(cat "$base$folder/$file")"; done
        case $folder in '' | /) break ;; esac
        folder=${folder%/*}
    done
} 2>/dev/null
while IFS=: read -r number names folder; do
    case $names in
    '') walk /sys/fs/cgroup "$folder" memory.max memory.current pids.max pids.current cpu.max ;;
    *memory*) walk /sys/fs/cgroup/memory "$folder" memory.limit_in_bytes memory.usage_in_bytes ;;
    *pids*) walk /sys/fs/cgroup/pids "$folder" pids.max pids.current ;;
    esac
done </proc/self/cgroup

tell at tmux
utf8=$(locale -a 2>/dev/null | grep -i 'utf-*8' | tr '\n' ' ')
tell utf8 "$utf8"
home_of() { case $1 in '~'*) printf %s "$HOME${1#'~'}" ;; *) printf %s "$1" ;; esac; }
IFS=:
for folder in $PATH:TMUX_FOLDERS; do
    IFS=' '
    program=$(home_of "$folder")/tmux
    [ -f "$program" ] && [ -x "$program" ] || continue
    real=$(readlink -f "$program")
    case "$seen" in *":$real:"*) continue ;; esac
    seen="$seen:$real:"
    for locale in C.UTF-8 $utf8; do
        said=$(LC_ALL=$locale bound PYTHON_S "$program" -V 2>&1)
        code=$?
        [ $code != 0 ] || break
    done
    tell tmux "$program $code $(printf %s "$said" | tr '\n' ' ')"
    [ $code != 0 ] || [ -n "$tmux" ] || tmux=$program
done
IFS=' 	
'
W=$(home_of "$W")
socket=$W/tmux-$(id -u)
tell socket "$socket"
if [ -e "$socket" ] || [ -L "$socket" ]; then
    ls -ld "$socket" 2>&1 | lines socket-is
    [ -z "$tmux" ] || { LC_ALL=$locale bound PYTHON_S "$tmux" -S "$socket" ls 2>&1 | head -n 3 | lines socket-says; }
fi
for file in $(grep -ls "[/]tmux-$(id -u)" /proc/[0-9]*/cmdline); do
    said=$(tr '\0' ' ' <"$file")
    pid=${file#/proc/}
    case $said in
    *tmux*" -S$socket new"* | *tmux*" -S $socket new"*) tell server "${pid%/*}" ;;
    esac
done 2>/dev/null

tell at python
case $PY in /*) python=$PY ;; *) python=$(command -v "${PY:-python3}") ;; esac
tell python "${python:-${PY:-python3}}"
if [ -n "$python" ]; then
    said=$(bound PYTHON_S "$python" -I -S -c 'import sys
print("T version %d.%d.%d" % sys.version_info[:3])
import time
print("T now %.3f" % time.time())
print("T executable " + sys.executable)
import importlib
for name in "MODULES".split():
    try: importlib.import_module(name)
    except ImportError as error: print("T lacks %s: %s" % (name, error))
import os.path, sysconfig
try: from importlib.util import find_spec
except ImportError: find_spec = lambda name: None
for name in ("venv", "ensurepip"):
    if find_spec(name) is None: print("T without " + name)
header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
if not os.path.exists(header): print("T headerless " + header)' 2>&1)
    tell python-code $?
    printf '%s\n' "$said" | lines python-says
fi

tell at gpu
for file in /dev/nvidia* /dev/dxg; do
    [ -e "$file" ] || [ -L "$file" ] || continue
    [ ! -d "$file" ] || continue
    ls -ld "$file" 2>&1 | lines device
    [ -c "$file" ] || continue
    said=$( (: <>"$file") 2>&1) && said=
    tell opens "$file ${said##*: }"
done
[ ! -r /proc/driver/nvidia/version ] || lines module </proc/driver/nvidia/version
tell at nvidia-smi
if command -v nvidia-smi >/dev/null; then
    said=$(bound SMI_S nvidia-smi --query-gpu=SMI_QUERY --format=csv,noheader,nounits 2>&1)
    tell smi-code $?
    printf '%s\n' "$said" | lines smi
fi

tell at mounts
lines mount </proc/self/mountinfo
place() {
    tell at "$1"
    state=-
    [ ! -d "$2" ] || state=d
    [ ! -w "$2" ] || [ ! -x "$2" ] || state=${state}w
    tell place "$1 $state $(readlink -f "$2" || printf %s "$2")"
    bound DISK_S df -Pk "$2" 2>&1 | tail -n 1 | lines "blocks $1"
    bound DISK_S df -Pi "$2" 2>/dev/null | tail -n 1 | lines "inodes $1"
}
place tmp "${TMPDIR:-/tmp}"
[ ! -e /dev/shm ] || place shm /dev/shm
tell at workdir
nearest=$W
while [ ! -e "$nearest" ] && [ ! -L "$nearest" ] && [ "$nearest" != / ]; do
    nearest=${nearest%/*}
    nearest=${nearest:-/}
done
tell workdir "$W"
tell nearest "$nearest"
ls -ldn "$nearest" 2>&1 | lines nearest-is
place workdir "$nearest"

if [ "$QUICK" = full ]; then
    tell at torch
    shift 6
    trainer=$PY
    if [ -z "$PY" ]; then
        newest=$(ls -dt "$W"/envs/*/lib/python3*/site-packages/torch 2>/dev/null | head -n 1)
        [ -z "$newest" ] || trainer=${newest%/lib/python3*}/bin/python
    fi
    if [ -n "$trainer" ]; then
        tell torch-python "$trainer"
        said=$(cd / && bound TORCH_S env "$@" "$trainer" -c "$TORCH" 2>&1)
        tell torch-code $?
        printf '%s\n' "$said" | tail -n 20 | lines torch
    fi
fi
tell end
"""
)
for _name, _value in {
    "TMUX_FOLDERS": ":".join([*(f"{root}/{name}/bin" for root in ("/opt", "~") for name in CONDA), "~/.local/bin"]),
    "FOLDERS": ":".join(PATH), "PROGRAMS": " ".join(PROGRAMS), "MANAGERS": " ".join(MANAGERS),
    "MODULES": " ".join(MODULES), "SMI_QUERY": SMI_QUERY, "SMI_S": str(SMI_S), "DISK_S": str(DISK_S),
    "TORCH_S": str(TORCH_S),
}.items():  # fmt: skip
    _TARGET = _TARGET.replace(_name, _value)

_TORCH = """
import json, time, warnings
begun, said = time.monotonic(), {}
try:
    import torch
except Exception as error:
    said["error"] = "%s: %s" % (type(error).__name__, error)
    said["absent"] = getattr(error, "name", None) == "torch"
else:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said.update(version=torch.__version__, cuda=torch.version.cuda or getattr(torch.version, "hip", None),
                    available=torch.cuda.is_available(), count=torch.cuda.device_count())
    said["warned"] = " ".join(" ".join(str(one.message).split()) for one in caught)
    if said["cuda"] and not said["available"]:
        try:
            torch._C._cuda_getDeviceCount()
        except Exception as error:
            said["why"] = " ".join(str(error).split())
said["seconds"] = time.monotonic() - begun
print("specctl-torch " + json.dumps(said))
"""
"""Counts the GPUs and makes no context: what a run has left of a GPU's memory may be less than one takes."""

_NODE = (
    ENTER
    + LOOK
    + _TELL
    + r"""
T=$1 vmid=$2 QUICK=$3
tell at node
tell now "$(date +%s)"
tell login "$(id -un)"
tell kernel "$(uname -srm)"
tell host "$(uname -n)"
tell at pve
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
dpkg-query -W -f '${Package} ${Version}\n' pve-container pve-manager lxc-pve 2>/dev/null | lines version
look "$vmid"
frozen "$vmid" 2>/dev/null && tell frozen
sed -n '/^\[/q; p' "/etc/pve/lxc/$vmid.conf" 2>/dev/null |
    grep -E '^(dev[0-9]+|mp[0-9]+|rootfs):' | lines conf
for file in /dev/nvidia*; do [ ! -c "$file" ] || tell device "$file"; done
[ ! -r /proc/driver/nvidia/version ] || lines module </proc/driver/nvidia/version
if [ "$(id -u)" != 0 ]; then
    said=$(sudo -n -l "$(command -v pct || echo /usr/sbin/pct)" exec "$vmid" -- true 2>&1)
    tell sudo-code $?
    printf '%s\n' "$said" | lines sudo
fi
tell at nvidia-smi
if [ "$QUICK" = full ] && [ -c /dev/nvidiactl ] && command -v nvidia-smi >/dev/null; then
    said=$(bound SMI_S nvidia-smi --query-gpu=SMI_QUERY --format=csv,noheader,nounits 2>&1)
    tell smi-code $?
    printf '%s\n' "$said" | lines smi
fi
tell end
exit 0
""".replace("SMI_QUERY", SMI_QUERY).replace("SMI_S", str(SMI_S))
)


def on_target(
    token: str, *, user: str | None, workdir: str, python: str | None, quick: bool, env: dict[str, str],
    gpus: list[int] | None, python_s: int = PYTHON_S, home: str = "",
) -> list[str]:  # fmt: skip
    """The argv that prints the facts of a machine, as its run's user meets it. A Python, or a tmux, that says nothing
    within `python_s` is let go of. `home`: what `~` is for who asks, where that is who runs too."""
    text = _TARGET.replace("PYTHON_S", str(python_s))
    loads = {name: value for name, value in env.items() if name.startswith(LOADS)}
    if gpus:
        loads["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return [
        "env", "-u", "ENV", "-u", "BASH_ENV", "-u", "SPECCTL_BECAME", "sh", "-c",
        'script=$1 T=$2; shift 2; eval "$script"', "specctl-doctor", text, token, user or "", workdir, python or "",
        "quick" if quick else "full", _TORCH, home, *(f"{name}={value}" for name, value in loads.items()),
    ]  # fmt: skip


def on_node(token: str, *, vmid: int, quick: bool) -> list[str]:
    """The argv that prints what a node knows of itself and of one of its containers."""
    return [*ON_NODE, _NODE, "specctl-doctor", token, str(vmid), "quick" if quick else "full"]
