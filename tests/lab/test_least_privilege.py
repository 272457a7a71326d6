"""docs/least-privilege.md: with the keys and rules that it prints, a run is launched, read, attached to and stopped;
and the key opens nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver import Specctl
from tests.lab.lab import USER, Lab
from tests.lab.typed import DOCS
from tests.terminal import Typed

PAGE = (DOCS / "least-privilege.md").read_text(encoding="utf-8")
CASES = [(0, "root", 103), (1, "train", 104)]


def block(language: str, number: int) -> str:
    return str(re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[number])


def here(text: str, vmid: int) -> str:
    """A line of the page as this lab needs it: its login, its container, its pct."""
    text = re.sub(r"^(Defaults:)?train\b", rf"\1{USER}", text, flags=re.MULTILINE)
    return text.replace(" 200 ", f" {vmid} ").replace("/usr/sbin/pct", "/usr/local/sbin/pct")


@pytest.fixture(params=CASES, ids=[who for _, who, _ in CASES])
def gpu1(lab: Lab, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Specctl, str, list[str]]]:
    """specctl with the page's key and inventory; who runs there; how that key logs in."""
    number, who, vmid = request.param
    lab.container(vmid, hostname="gpu1")
    lab.inside(vmid, ["sh", "-ec", "useradd -m train; mkdir -p /workspace; chown train /workspace"], check=True)
    key, keys = tmp_path / "gpu1", lab.run / "ssh" / "authorized_keys"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    options = here(block("authorized_keys", number).partition(" ssh-ed25519")[0], vmid)
    before = keys.read_text()
    keys.write_text(f"{before}{options} {key.with_suffix('.pub').read_text()}")
    lab.set_sudo(here(block("sudoers", number), vmid))
    config = tmp_path / "ssh_config"
    node = lab.ssh_config.read_text().replace("Host pve", "Host gpu1").replace("User root", f"User {USER}")
    config.write_text(re.sub("IdentityFile .*", f"IdentityFile {key}", node))
    specctl = Specctl(block("yaml", 0), SPECCTL_SSH_CONFIG=str(config))
    yield specctl, who, ["ssh", "-F", str(config), "gpu1"]
    lab.set_sudo("")
    keys.write_text(before)
    lab.remove(vmid)
    specctl.close()


def test_the_key_is_good_for_all_of_specctl_and_for_nothing_else(gpu1: tuple[Specctl, str, list[str]]) -> None:
    specctl, who, login = gpu1
    assert f"gpu1  ready  gpu1, as {who}," in specctl("targets").out
    done = specctl.launch("--note", "ünï", "--", "python3", specctl.program("steps.py"), target="gpu1")
    assert done.code == 0, done.err
    row = specctl.status()
    assert row["state"] == "RUNNING" and row["note"] == "ünï"
    assert specctl("logs", "-n", "1").out.startswith("step=")
    assert specctl("pull", "@last", "--to", "got").code == 0
    attached = Typed(
        [sys.executable, "-m", "orchestrator", "attach", "@last"], cwd=specctl.project,
        environ={**specctl.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    attached.until("step=")
    attached.type("\x02d")
    assert attached.end() == 0 and "it goes on: RUNNING" in attached.text
    assert specctl("stop", "@last").code == 0

    def typed(*words: str) -> str:
        run = subprocess.run([*login, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        return run.stdout + run.stderr

    assert typed("id -un; hostname").split() == [who, "gpu1"], "whatever is typed runs in the container"
    assert "pct" in typed("pct list") and "not found" in typed("pct list")
    port = re.findall(r"Port (\d+)", Path(login[2]).read_text())[0]
    assert typed("-W", f"127.0.0.1:{port}") == "stdio forwarding failed\n", "nothing is forwarded"
