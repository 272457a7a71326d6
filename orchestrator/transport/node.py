"""What runs on a node, in its `sh`: the way into a container, and a look at why there was none.

`pct.py` sends one command with it, `fanout.py` many. It needs nothing of the node but sh, coreutils and grep, and works
for root and for a user whose sudo lets exactly `pct exec` through.
"""

from __future__ import annotations

ON_NODE = [
    "env", "-u", "ENV", "-u", "BASH_ENV", "-u", "CDPATH", "-u", "LANGUAGE", "LC_ALL=C.UTF-8", "sh", "-c",
]  # fmt: skip
"""What every script on a node starts with. perl refuses to run with ENV or BASH_ENV, and without a UTF-8 locale it
turns each byte of an argument that is not ASCII into U+FFFD; sudo would speak the language of LANGUAGE."""

ENTER = r"""
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
say() { echo "specctl-node: $*" >&2; }
frozen() {
    for file in /sys/fs/cgroup/lxc/"$1"/cgroup.events /sys/fs/cgroup/lxc/"$1"/ns/cgroup.events \
        /sys/fs/cgroup/freezer/lxc/"$1"/freezer.state /sys/fs/cgroup/freezer/lxc/"$1"/ns/freezer.state; do
        [ -r "$file" ] || continue
        while read -r key value; do
            case "$key $value" in
            "frozen 1" | "FROZEN " | "FREEZING ")
                say "container $1 is frozen"
                return 0
                ;;
            esac
        done <"$file"
    done
    return 1
}
listens() { grep -q "@/var/lib/lxc/$1/command\$" /proc/net/unix; }
enter() {
    vmid=$1 limit_s=$2 attach=$3
    shift 3
    cd / || exit 255
    ! frozen "$vmid" || exit 255
    sudo= tool=pct
    [ "${SPECCTL_UID:=$(id -u)}" = 0 ] || sudo=$(command -v sudo) || { say "no sudo on this node"; exit 255; }
    case $attach in
    auto)
        if [ -z "$sudo" ] && [ -e "/etc/pve/lxc/$vmid.conf" ] && command -v lxc-attach >/dev/null && listens "$vmid"
        then tool=lxc-attach; fi
        ;;
    lxc)
        tool=lxc-attach node=$(readlink /etc/pve/local) || { say "no /etc/pve/local on this node"; exit 255; }
        if ! [ -e "/etc/pve/lxc/$vmid.conf" ]; then
            echo "Configuration file '$node/lxc/$vmid.conf' does not exist" >&2
            exit 255
        elif ! listens "$vmid"; then
            echo "container '$vmid' not running!" >&2
            exit 255
        fi
        ;;
    esac
    program=$(command -v "$tool") || { say "no $tool on this node"; exit 255; }
    outer_s=$limit_s
    if [ -n "$sudo" ] && [ "$limit_s" != none ]; then
        outer_s=$((limit_s + 2))
        set -- timeout -s KILL "$limit_s" "$@"
    fi
    case $tool in
    pct) set -- "$program" exec "$vmid" -- "$@" ;;
    *) set -- "$program" -n "$vmid" --clear-env -- "$@" ;;
    esac
    [ -z "$sudo" ] || set -- "$sudo" -n "$@"
    set -- env -i PATH="$PATH" LC_ALL=C.UTF-8 "$@"
    [ "$limit_s" = none ] || set -- timeout -s KILL "$outer_s" "$@"
    exec "$@"
}
"""
"""`enter VMID SECONDS|none ATTACH ARGV...` becomes ARGV in the container, or says why not and exits 255.

A frozen container would let it hang, so it is recognised first. `timeout` ends there what closing a channel does not.
It does so by KILL to the whole group: with TERM it is content when lxc-attach ends, and a command that ignores TERM
lives on in the container. Past sudo a user's KILL does not reach, so there `timeout` runs in the container; the outer
one only lets go of a container that was frozen meanwhile.

lxc-attach is what `pct exec` becomes after half a second of Perl. It is taken only after the same checks, and where one
of them fails under `auto`, pct is asked and says so in its own words. pct hands the session's variables over unless
told not to, which it can be only since PVE 8.1: so it gets none."""

LOOK = r"""
look() (
    PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
    echo "user: $(id -un)"
    for tool in pct lxc-attach; do echo "$tool: $(command -v "$tool")"; done
    grep -q "@/var/lib/lxc/$1/command\$" /proc/net/unix && echo "listens"
    cd /etc/pve 2>/dev/null || exit 0
    echo "node: $(readlink local)"
    [ ! -r "lxc/$1.conf" ] || sed -n '/^\[/q; s/^lock: */lock: /p' "lxc/$1.conf"
    for file in nodes/*/lxc/"$1".conf nodes/*/qemu-server/"$1".conf; do [ -e "$file" ] && echo "at: $file"; done
    for file in lxc/*.conf; do [ -e "$file" ] && echo "here: $file"; done
    exit 0
)
"""
"""`look VMID` prints what the node can tell of a container without pct: facts for an error message, one a line."""
