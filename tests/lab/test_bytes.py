"""Words, values and secrets on their longest way: laptop, SSH, pct, agent, tmux, supervisor, program; and what the
container's user may not read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from tests.driver import Specctl
from tests.lab.lab import Lab
from tests.system.test_bad_input import HOSTILE, PLAIN, SECRET, SHOW

WORKDIR = "/home/reader/my work"


@pytest.fixture(scope="module")
def specctl(lab: Lab) -> Iterator[Specctl]:
    """A target whose runs belong to a user of the container, in a folder with a space in its name."""
    lab.inside(101, ["sh", "-c", "id reader 2>/dev/null || useradd -m reader"], check=True)
    driver = Specctl(SPECCTL_SSH_CONFIG=str(lab.ssh_config))
    driver.inventory.write_text(
        f"targets:\n  ct101: {{ssh: pve, vmid: 101, user: reader, workdir: {WORKDIR}, "
        f"env: {{PLAIN: {json.dumps(PLAIN)}}}, secrets: [SECRET]}}\n"
    )
    yield driver
    driver("stop", "show", "--now")
    lab.inside(101, ["sh", "-c", f"tmux -S '{WORKDIR}'/tmux-* kill-server; rm -rf '{WORKDIR}' /etc/closed"])
    driver.close()


def test_bytes_arrive_through_ssh_and_pct_and_a_secret_is_nowhere_but_in_its_program(
    specctl: Specctl, lab: Lab
) -> None:
    (specctl.project / "show.py").write_text(SHOW)
    note = 'it\'s "$HOME"; echo X'
    done = specctl.launch("--note", note, "--", "python3", "show.py", *HOSTILE, target="ct101", SECRET=SECRET)
    assert done.code == 0, done.err
    run_id = done.json["run_id"]
    told = json.loads(specctl("logs", run_id, "--grep", '^.."').out)
    secret = os.fsencode(SECRET)
    assert told == [[os.fsencode(word).hex() for word in HOSTILE], PLAIN.encode().hex(), len(secret), secret[:1].hex()]
    assert note in specctl("show", run_id).out

    # The brackets keep the search itself from being found.
    look = "grep -rl 'hunter[2]' '{0}' /tmp /root; grep -la 'hunter[2]' /proc/[0-9]*/cmdline /proc/[0-9]*/environ"
    found = lab.inside(101, ["sh", "-c", look.format(WORKDIR)]).stdout.splitlines()
    assert [path.rpartition("/")[2] for path in found] == ["environ"], found
    assert "show.py" in lab.inside(101, ["cat", found[0].replace("environ", "cmdline")], errors="replace").stdout
    assert lab.on_node(["sh", "-c", "grep -la 'hunter[2]' /proc/[0-9]*/cmdline"]).stdout == ""


def test_what_the_user_of_the_container_may_not_read_is_said_before_the_start(specctl: Specctl, lab: Lab) -> None:
    lab.inside(101, ["sh", "-c", "umask 077; mkdir -p /etc/closed; echo x > /etc/closed/data.txt"], check=True)
    (specctl.project / "run.yaml").write_text("data: [/etc/closed/data.txt, /etc/shadow, ~/none, /etc/passwd]\n")
    done = specctl.launch("--config", "run.yaml", "--", "true", target="ct101", SECRET="x")
    message = done.json["error"]["message"]
    assert done.code == 1 and done.json["state"] == "NEVER_STARTED"
    assert "on ct101, data[0]: /etc/closed/data.txt cannot be read by reader: Permission denied" in message
    assert "data[1]: /etc/shadow cannot be read by reader" in message
    assert "data[2]: ~/none (/home/reader/none) is not there" in message and "data[3]" not in message
    assert "mend it there, or correct data[0] in run.yaml" in message
    (specctl.project / "run.yaml").write_text("data: [~/my data.txt]\n")
    message = specctl.launch("--config", "run.yaml", "--", "true", target="ct101", SECRET="x").json["error"]["message"]
    assert "specctl push ct101 SRC '/home/reader/my data.txt', or correct data[0] in run.yaml" in message
