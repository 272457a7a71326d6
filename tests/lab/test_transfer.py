"""Push, pull and prune through real ssh and pct, into a container and out of it, as the run's user."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver import Specctl
from tests.lab.lab import Lab

USER = "carrier"


@pytest.fixture(scope="module")
def specctl(lab: Lab) -> Iterator[Specctl]:
    lab.inside(102, ["sh", "-c", f"id {USER} 2>/dev/null || useradd -m {USER}"], check=True, capture_output=True)
    driver = Specctl(
        f"targets:\n  box: {{ssh: pve, vmid: 102, user: {USER}, workdir: ~/w}}\n",
        SPECCTL_SSH_CONFIG=str(lab.ssh_config),
    )
    yield driver
    lab.inside(102, ["sh", "-c", f"pkill -u {USER}; rm -rf /home/{USER}"], capture_output=True)
    driver.close()


def test_a_folder_goes_in_as_the_user_and_comes_out_again_byte_for_byte(specctl: Specctl, lab: Lab) -> None:
    source = specctl.project / "data"
    (source / "empty").mkdir(parents=True)
    for name in (b"\xff\xfe", b"new\nline", "ünï".encode(), b"-rf", b"it's \"$HOME\"; echo X"):
        (source / os.fsdecode(name)).write_bytes(os.urandom(100) + name)
    (source / "zeros").write_bytes(bytes(1 << 20))
    (source / "large").write_bytes(os.urandom(3 << 20))
    (source / "link").symlink_to("zeros")
    (source / "program").write_text("#!/bin/sh\n")
    (source / "program").chmod(0o755)
    done = specctl("push", "box", "data", "~/in here/data", "--json")
    assert done.code == 0, done.err
    assert done.json["destination"] == f"/home/{USER}/in here/data" and done.json["files"] == 9
    program = f"/home/{USER}/in here/data/program"
    listing = lab.inside(102, ["stat", "-c", "%U %a", program], capture_output=True, text=True)
    assert listing.stdout == f"{USER} 755\n"
    again = specctl("push", "box", "data", "~/in here/data", "--json").json
    assert (again["files"], again["same"], again["sent_bytes"]) == (0, 9, 0)

    run_id = specctl.launch("--no-source", "--", "true", target="box").json["run_id"]
    done = specctl("pull", run_id, f"/home/{USER}/in here/data", "--to", "out", "--json")
    assert done.code == 0, done.err
    for path in source.rglob("*"):
        copy = specctl.project / "out" / path.relative_to(specctl.project)
        assert copy.lstat().st_mode == path.lstat().st_mode
        assert path.is_dir() or copy.read_bytes() == path.read_bytes()
    done = specctl("pull", run_id, "--json")
    assert done.code == 0
    assert json.loads((specctl.project / run_id / "run.json").read_text())["spec"]["run_id"] == run_id


def test_no_room_and_no_permission_are_one_message_each(specctl: Specctl, lab: Lab) -> None:
    disk = f"/home/{USER}/disk"
    mount = f"mkdir -p {disk} && mount -t tmpfs -o size=4m,mode=777 none {disk}"
    lab.inside(102, ["sh", "-c", mount], check=True)
    try:
        (specctl.project / "big").write_bytes(os.urandom(6 << 20))
        done = specctl("push", "box", "big", f"{disk}/big")
        assert done.code == 1 and "too little room" in done.err and done.err.count("error:") == 1
    finally:
        lab.inside(102, ["umount", disk], check=True)
    done = specctl("push", "box", "big", "/etc/big")
    assert done.code == 1 and f"/etc cannot be written there by user {USER}" in done.err


def test_prune_shows_what_a_container_has(specctl: Specctl, tmp_path: Path, lab: Lab) -> None:
    run_id = specctl.launch("--no-source", "--", "true", target="box").json["run_id"]
    done = specctl("prune", "--runs", "--older-than", "0s", "--yes", "--json")
    assert done.code == 0, done.err
    [place] = done.json["targets"]
    assert f"run/{run_id}" in place["gone"] and place["freed_bytes"] > 0
    assert specctl("pull", run_id, "--to", str(tmp_path)).code == 4

    # An agent outside both workdirs of this user is one thing, whichever target it is found through.
    script = f"""home=/tmp/specctl-agents-$(id -u {USER}); agent=$home/{"a" * 16}
        mkdir -p -m 700 $home $agent /home/{USER}/w2; touch -d '3 days ago' $agent
        chown -R {USER} $home /home/{USER}/w2; echo agent/$agent"""
    made = lab.inside(102, ["sh", "-ec", script], capture_output=True, text=True, check=True)
    more = f"  twin: {{ssh: pve, vmid: 102, user: {USER}, workdir: ~/w2}}\n"
    specctl.inventory.write_text(specctl.inventory.read_text() + more)
    done = specctl("prune", "--yes", "--json")
    assert done.code == 0, done.out
    assert [key for place in done.json["targets"] for key in place["gone"]] == [made.stdout.strip()]
