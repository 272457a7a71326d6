"""What can happen to the container of a run, and to its node."""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Iterator

from tests.lab.matrix import WORKDIR, Scene, fault, flat

PCT = "/usr/local/sbin/pct"
REAL_PCT = "/run/lab/run/sbin/pct"
BOOT_ID = "/proc/sys/kernel/random/boot_id"


@contextlib.contextmanager
def pct_is(scene: Scene, script: str) -> Iterator[None]:
    """Puts a shell script in the place of the node's pct."""
    scene.on_node(f"printf '%s\\n' '#!/bin/sh' {shlex.quote(script)} >/run/lab/broken-pct")
    scene.on_node(f"chmod 755 /run/lab/broken-pct && mount --bind /run/lab/broken-pct {PCT}")
    try:
        yield
    finally:
        scene.on_node(f"umount {PCT}")


def enter_always(scene: Scene, how: str) -> None:
    """Writes the way into containers, `attach:`, into the inventory."""
    text = f"defaults: {{ssh: pve, workdir: {WORKDIR}, attach: {how}}}\ntargets: {{ct101: {{vmid: 101}}}}\n"
    scene.specctl.inventory.write_text(text)


@fault
def the_container_was_rebooted(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.lab.reboot(scene.vmid)
    yield


@fault
def the_container_is_frozen(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.lab.freeze(scene.vmid)
    for verb in ("push", "pull"):
        done = scene.ask(verb)
        assert done.code == 3 and "container 101 is frozen" in done.err and "thaw it" in done.err, done
    yield
    scene.lab.thaw(scene.vmid)


@fault
def the_container_is_stopped(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.lab.stop(scene.vmid)
    yield
    scene.lab.start(scene.vmid)


@fault
def the_container_is_gone(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.lab.stop(scene.vmid)
    scene.lab.undefine(scene.vmid)
    yield
    scene.lab.container(scene.vmid)


@fault
def the_container_was_moved_to_another_node(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.lab.stop(scene.vmid)
    here, there = f"/etc/pve/nodes/pve/lxc/{scene.vmid}.conf", "/etc/pve/nodes/pve2/lxc"
    scene.on_node(f"mkdir -p {there} && mv {here} {there}")
    yield
    scene.on_node(f"mv {there}/{scene.vmid}.conf {here} && rm -r /etc/pve/nodes/pve2")
    scene.lab.start(scene.vmid)


@fault
def a_backup_runs_and_locks_the_container(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.lab.define(scene.vmid, lock="backup")
    yield
    scene.lab.define(scene.vmid)


@fault
def a_snapshot_locks_and_freezes_the_container(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.lab.define(scene.vmid, lock="snapshot")
    scene.lab.freeze(scene.vmid)
    yield
    scene.lab.thaw(scene.vmid)
    scene.lab.define(scene.vmid)


@fault
def a_backup_has_stopped_and_locked_the_container(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.lab.stop(scene.vmid)
    scene.lab.define(scene.vmid, lock="backup")
    yield
    scene.lab.container(scene.vmid)


@fault
def another_pct_command_holds_its_configuration(scene: Scene) -> Iterator[None]:
    scene.start()
    lock = f"/run/lock/lxc/pve-config-{scene.vmid}.lock"
    scene.on_node(f"setsid flock {lock} sleep 600 >/dev/null 2>&1 & echo $! >/run/lab/holder")
    scene.on_node(f"while flock --nonblock {lock} true; do sleep 0.05; done")
    yield
    scene.on_node(f"! flock --nonblock {lock} true")  # all the while
    scene.on_node("kill -- -$(cat /run/lab/holder) 2>/dev/null || kill $(cat /run/lab/holder)")


@fault
def the_node_was_rebooted(scene: Scene) -> Iterator[None]:
    """Every process is gone and the kernel's boot id is another one; a pid 1 with the old start time proves nothing."""
    scene.start()
    scene.lab.clear(scene.vmid, "/nothing")
    scene.on_node(
        "cat /proc/sys/kernel/random/uuid >/run/lab/boot_id; "
        f"nsenter --target=$(lxc-info -n {scene.vmid} -pH) --mount --pid "
        f"sh -c 'cat >/tmp/boot_id; mount --bind /tmp/boot_id {BOOT_ID}' </run/lab/boot_id"
    )
    assert scene.inside(f"cat {BOOT_ID}") == scene.on_node("cat /run/lab/boot_id")
    yield
    scene.on_node(f"nsenter --target=$(lxc-info -n {scene.vmid} -pH) --mount --pid umount {BOOT_ID}")


@fault
def the_node_s_pct_hangs(scene: Scene) -> Iterator[None]:
    scene.start()
    enter_always(scene, "pct")
    scene.together = True
    with pct_is(scene, "exec sleep 600"):
        yield


@fault
def the_node_s_pct_hangs_and_reads_need_it_not(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.together = True
    with pct_is(scene, "exec sleep 600"):
        yield


@fault
def the_node_is_so_busy_that_pct_takes_long(scene: Scene) -> Iterator[None]:
    scene.start()
    enter_always(scene, "pct")
    with pct_is(scene, f'sleep 2; exec {REAL_PCT} "$@"'):
        yield


@fault
def pct_prints_noise_around_the_reply(scene: Scene) -> Iterator[None]:
    scene.start()
    enter_always(scene, "pct")
    noise = "printf 'perl: warning: Setting locale failed.\\n\\036specctl1 \\r\\ntrailing' | tee /dev/stderr"
    with pct_is(scene, f'{noise}; {REAL_PCT} "$@"; code=$?; {noise}; exit $code'):
        yield


@fault
def the_node_s_cluster_file_system_is_down(scene: Scene) -> Iterator[None]:
    scene.start()
    enter_always(scene, "pct")
    said = "\\n".join(f"ipcc_send_rec[{number}] failed: Connection refused" for number in (1, 2, 3))
    said += "\\nUnable to load access control list: Connection refused"
    scene.on_node("mount -t tmpfs empty /etc/pve")
    with pct_is(scene, f"printf '{said}\\n' >&2; exit 111"):
        yield
    scene.on_node("umount /etc/pve")


@fault
def pct_is_half_upgraded(scene: Scene) -> Iterator[None]:
    scene.start()
    enter_always(scene, "pct")
    said = (
        "Can't locate PVE/LXC/Setup.pm in @INC (you may need to install the PVE::LXC::Setup module) (@INC contains: "
        "/etc/perl /usr/share/perl5) at /usr/share/perl5/PVE/CLI/pct.pm line 12.\n"
        "BEGIN failed--compilation aborted at /usr/sbin/pct line 6."
    )
    with pct_is(scene, f"printf '%s\\n' {shlex.quote(said)} >&2; exit 2"):
        yield


@fault
def the_node_has_no_pct_any_more(scene: Scene) -> Iterator[None]:
    scene.start()
    enter_always(scene, "pct")
    scene.on_node(f"mount --bind /dev/null {PCT}")
    yield
    scene.on_node(f"umount {PCT}")


@fault
def the_clock_jumped_two_hours_ahead(scene: Scene) -> Iterator[None]:
    yield from clock_jumps(scene, "+2h")


@fault
def the_clock_jumped_two_hours_back(scene: Scene) -> Iterator[None]:
    yield from clock_jumps(scene, "-2h")


@fault
def the_clock_jumped_ahead_under_a_run_that_seldom_steps(scene: Scene) -> Iterator[None]:
    yield from clock_jumps(scene, "+2h", *SELDOM)


@fault
def the_clock_jumped_ahead_before_the_first_step(scene: Scene) -> Iterator[None]:
    yield from clock_jumps(scene, "+2h", "sh", "-c", "echo loading; exec sleep 600", until="process")


@fault
def the_clock_jumped_back_under_a_run_that_stands_still(scene: Scene) -> Iterator[None]:
    """So much time passes besides that it is a stall, by a clock that nobody has set."""
    yield from clock_jumps(scene, "-2h", *SELDOM, stands_s=300)


SELDOM = ("sh", "-c", "echo step=1 tok/s=700; sleep 1; echo step=2 tok/s=700; exec sleep 600")


def clock_jumps(scene: Scene, offset: str, *program: str, until: str = "step", stands_s: int = 0) -> Iterator[None]:
    scene.lab.clock(scene.vmid)  # from here on its Pythons heed the next
    scene.start(*program, until=until)
    began = time.time()
    scene.lab.clock(scene.vmid, offset, passed_s=stands_s)
    asked = time.time()
    done = scene.specctl("logs", scene.run_id, "--since", "20m")
    assert done.code == 0 and scene.specctl("logs", scene.run_id).out.startswith(done.out), done
    # What is said is by this machine's clock, which nobody has set.
    said = re.search(r"since (\S+) \(20 min ago\): the run began only (\S+); all its lines", flat(done.err))
    assert said, done.err
    for shown, meant in zip(said.groups(), (asked - 1200, began - stands_s), strict=True):
        hours, minutes, seconds = map(int, shown.split(":"))
        there = time.localtime(meant)
        late_s = (hours - there.tm_hour) * 3600 + (minutes - there.tm_min) * 60 + seconds - there.tm_sec
        assert (late_s + 60) % 86400 <= 120, done.err
    yield
    scene.lab.clock(scene.vmid)
