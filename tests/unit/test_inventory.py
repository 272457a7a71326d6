"""inventory: hosts.yaml becomes targets, and every mistake in it is one line with file, line and key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from orchestrator.errors import Ambiguous, ConfigError, NotFound
from orchestrator.inventory import (
    DEFAULT_WORKDIR,
    HostsFile,
    Inventory,
    Target,
    load_inventory,
    parse_inventory,
    read_inventory,
)

FULL = """\
default_target: local
defaults: {workdir: /workspace/specctl, env: {A: default, B: default}, secrets: [HF_TOKEN]}
targets:
  local: {}
  gpu1:
    ssh: pve1
    vmid: 200
    workdir: /data/my run
    python: /opt/venv/bin/python
    user: train
    gpus: [0, 1, 2, 3]
    env: {B: own, HF_HOME: /workspace/hf}
    secrets: [WANDB_KEY]
  gpu2: {ssh: "root@[fe80::1]:2222", vmid: "201"}
groups: {lab: [gpu1, gpu2], one: [gpu2]}
"""


def test_a_full_file_becomes_targets_with_the_defaults_merged_under_each() -> None:
    inventory = parse_inventory(FULL)
    assert inventory.targets["local"] == Target(
        name="local", workdir="/workspace/specctl", env={"A": "default", "B": "default"}, secrets=["HF_TOKEN"]
    )
    assert inventory.targets["gpu1"] == Target(
        name="gpu1",
        ssh="pve1",
        vmid=200,
        workdir="/data/my run",
        python="/opt/venv/bin/python",
        user="train",
        gpus=[0, 1, 2, 3],
        env={"A": "default", "B": "own", "HF_HOME": "/workspace/hf"},
        secrets=["WANDB_KEY"],
    )
    assert inventory.targets["gpu2"].vmid == 201
    assert inventory.targets["gpu1"].place == "container 200 on pve1"
    assert inventory.targets["local"].place == "this machine"


def test_how_containers_are_entered_may_stand_in_the_defaults_beside_targets_without_one() -> None:
    text = "defaults: {attach: lxc}\ntargets: {a: {vmid: 101}, b: {}, c: {vmid: 102, attach: pct}}"
    inventory = parse_inventory(text)
    assert [target.attach for target in inventory.targets.values()] == ["lxc", "lxc", "pct"]
    assert parse_inventory("targets: {a: {vmid: 101}}").targets["a"].attach == "auto"


def test_every_key_of_the_file_says_what_it_means() -> None:
    schema = HostsFile.model_json_schema()
    keys = {**schema["properties"], **schema["$defs"]["Entry"]["properties"]}
    assert [name for name, key in keys.items() if len(key.get("description", "")) < 20] == []
    assert set(schema["$defs"]["Entry"]["properties"]) == {field.name for field in fields(Target)} - {"name"}


def test_without_any_workdir_it_is_the_home_directory_of_the_target_unexpanded() -> None:
    assert parse_inventory("targets: {a: {}}").targets["a"].workdir == DEFAULT_WORKDIR == "~/.specctl"


def test_an_empty_value_in_a_target_undoes_the_default() -> None:
    inventory = parse_inventory("defaults: {ssh: pve1, gpus: [0]}\ntargets: {a: {}, b: {ssh: null, gpus: ~}}")
    assert (inventory.targets["a"].ssh, inventory.targets["a"].gpus) == ("pve1", [0])
    assert (inventory.targets["b"].ssh, inventory.targets["b"].gpus) == (None, None)


@pytest.mark.parametrize(
    ("entry", "key", "part"),
    [
        ("vmid: 0123", "targets.x.vmid", "whole number"),
        ("vmid: 10_1", "targets.x.vmid", "whole number"),
        ("vmid: 5", "targets.x.vmid", "greater than or equal to 100"),
        ("vmid: -200", "targets.x.vmid", "greater than or equal to 100"),
        ("vmid: 1000000000", "targets.x.vmid", "less than or equal to 999999999"),
        ("vmid: 101, attach: lcx", "targets.x.attach", "must be 'auto', 'pct' or 'lxc', is 'lcx'"),
        ("vmid: 101, attach: ''", "targets.x.attach", "must be 'auto', 'pct' or 'lxc', is ''"),
        ("vmid: 101, attach: yes", "targets.x.attach", "must be 'auto', 'pct' or 'lxc', is 'yes'"),
        ("attach: lxc", "targets.x.attach", "is how a container is entered, and this target has no vmid"),
        ("vmid: 101, sudo: true", "targets.x.sudo", "unknown key"),
        ("gpus: no", "targets.x.gpus", "needs a list"),
        ("gpus: 0", "targets.x.gpus", "needs a list"),
        ("gpus: [0, 0]", "targets.x.gpus[1]", "names GPU 0 twice"),
        ("gpus: [-1]", "targets.x.gpus[0]", "0 or more"),
        ("gpus: [a]", "targets.x.gpus[0]", "whole number"),
        ("vmdi: 200", "targets.x.vmdi", "did you mean 'vmid'?"),
        ("ssh: -oProxyCommand=x", "targets.x.ssh", "ssh_config alias"),
        ("ssh: 'a b'", "targets.x.ssh", "ssh_config alias"),
        ("ssh: ''", "targets.x.ssh", "ssh_config alias"),
        ('ssh: "a\\e[2J"', "targets.x.ssh", "ssh_config alias"),
        ("workdir: work", "targets.x.workdir", "absolute path"),
        ("workdir:", "targets.x.workdir", "needs text, is empty"),
        ('workdir: "/a\\nb"', "targets.x.workdir", "absolute path"),
        ("python: bin/python", "targets.x.python", "absolute path"),
        ("user: 'a b'", "targets.x.user", "name of a user"),
        ("env: {1A: x}", "targets.x.env.1A", "environment variable"),
        ('env: {A: "a\\0b"}', "targets.x.env.A", "NUL"),
        ("env: {SPECCTL_NONCE: x}", "targets.x.env.SPECCTL_NONCE", "is specctl's own"),
        ("secrets: [HF_TOKEN=abc]", "targets.x.secrets[0]", "never its value"),
        ("env: {T: x}, secrets: [T]", "targets.x", "both in env and in secrets"),
    ],
)
def test_a_wrong_target_is_one_line_with_file_line_and_key(entry: str, key: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_inventory(f"targets:\n  ok: {{}}\n  x: {{{entry}}}\n")
    message = str(caught.value)
    assert message.startswith(f"hosts.yaml:3: {key}: ")
    assert part in message
    assert "\n" not in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("targets: {}", "hosts.yaml:1: targets: needs at least one target, such as `local: {}`"),
        ("targets:\n  local:", "hosts.yaml:2: targets.local: needs a mapping (key: value), is empty; "
         "write {} for one without keys"),
        ("default_target: a", "hosts.yaml:1: targets: is missing"),
        ("targets: {a: {}}\ndefault_target: b", "hosts.yaml:2: default_target: no target 'b'; there are a"),
        ("targets: {gpu1: {}}\ngroups:\n  lab: [gpu1,\n    gpu12]", "hosts.yaml:4: groups.lab[1]: no target 'gpu12'; "
         "did you mean 'gpu1'?"),
        ("targets: {a: {}}\ngroups: {a: [a]}", "hosts.yaml:2: groups.a: is also the name of a target; "
         "a group needs one of its own"),
        ("targets:\n  a: {}\n  a: {}", "hosts.yaml:3: targets.a: duplicate key (first on line 2)"),
        ("targets:\n  a b: {}", 'hosts.yaml:2: targets."a b": a name is letters, digits, dots, dashes and underscores'),
        ("target: {a: {}}", "hosts.yaml:1: target: unknown key; did you mean 'targets'?"),
        ("defaults: {vmid: no}\ntargets: {a: {}}", "hosts.yaml:1: defaults.vmid: needs a whole number in plain decimal "
         "(such as 8), is 'no'"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_inventory(text)
    assert str(caught.value) == message


def test_a_name_resolves_and_none_is_the_default() -> None:
    inventory = parse_inventory(FULL)
    assert inventory.resolve("gpu1").name == "gpu1"
    assert inventory.resolve(None).name == "local"
    assert parse_inventory("targets: {only: {}}").resolve(None).name == "only"


def test_an_unknown_name_lists_the_candidates_and_exits_4() -> None:
    inventory = parse_inventory(FULL)
    with pytest.raises(NotFound, match=r"no target 'gpu3' in hosts.yaml; it knows local, gpu1, gpu2") as caught:
        inventory.resolve("gpu3")
    assert caught.value.exit_code == 4
    assert "did you mean 'gpu" in (caught.value.hint or "")
    with pytest.raises(NotFound, match=r"no target or group 'x' in hosts.yaml; it knows local, gpu1, gpu2, lab, one"):
        inventory.expand(["lab", "x"])


def test_without_a_name_and_a_default_several_targets_are_ambiguous() -> None:
    inventory = parse_inventory("targets: {a: {}, b: {}}\ngroups: {g: [a, b]}")
    for name in (None, "g"):
        with pytest.raises(Ambiguous, match="a, b") as caught:
            inventory.resolve(name)
        assert caught.value.exit_code == 4


def test_expand_takes_targets_and_groups_and_names_each_once() -> None:
    inventory = parse_inventory(FULL)
    assert [target.name for target in inventory.expand(["gpu2", "lab", "local"])] == ["gpu2", "gpu1", "local"]


def find(explicit: str | None, environ: dict[str, str], tmp_path: Path) -> Inventory:
    cwd, home = tmp_path / "cwd", tmp_path / "home"
    return load_inventory(explicit, environ=environ, cwd=cwd, home=home)


def test_the_inventory_is_looked_for_in_the_documented_order(tmp_path: Path) -> None:
    places = {
        "flag": tmp_path / "flag.yaml",
        "variable": tmp_path / "variable.yaml",
        "here": tmp_path / "cwd" / "hosts.yaml",
        "home": tmp_path / "home" / ".config" / "specctl" / "hosts.yaml",
    }
    for name, path in places.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"targets: {{{name}: {{}}}}\n")
    flag, environ = str(places["flag"]), {"SPECCTL_INVENTORY": str(places["variable"])}
    assert list(find(flag, environ, tmp_path).targets) == ["flag"]
    assert list(find("../flag.yaml", {}, tmp_path).targets) == ["flag"]
    assert list(find(None, environ, tmp_path).targets) == ["variable"]
    assert list(find(None, {"SPECCTL_INVENTORY": ""}, tmp_path).targets) == ["here"]
    assert find(None, {}, tmp_path).source == "hosts.yaml"
    places["here"].unlink()
    assert list(find(None, {}, tmp_path).targets) == ["home"]
    places["home"].unlink()
    builtin = find(None, {}, tmp_path)
    assert builtin.builtin
    assert builtin.resolve(None) == Target(name="local")
    with pytest.raises(NotFound, match=r"no target 'gpu1' in the built-in inventory \(there is no ./hosts.yaml or"):
        builtin.resolve("gpu1")


@pytest.mark.parametrize(("explicit", "environ"), [("no.yaml", {}), (None, {"SPECCTL_INVENTORY": "no.yaml"})])
def test_a_named_file_that_does_not_exist_is_an_error_not_a_fallback(
    explicit: str | None, environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "hosts.yaml").write_text("targets: {a: {}}")
    with pytest.raises(ConfigError, match=r"no.yaml: no such file") as caught:
        find(explicit, environ, tmp_path)
    assert ("SPECCTL_INVENTORY" if environ else "--inventory") in (caught.value.hint or "")


def test_the_repositorys_own_hosts_file_and_its_commented_example_are_valid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "hosts.yaml").read_text()
    assert parse_inventory(text).resolve(None) == Target(name="local")
    uncommented = "\n".join(line[1:] if line.startswith("#  ") else line for line in text.splitlines())
    uncommented = uncommented.replace("# defaults", "defaults").replace("# groups", "groups").replace("\n#\n", "\n")
    inventory = parse_inventory(uncommented)
    assert inventory.targets["gpu1"].gpus == [0, 1, 2, 3]
    assert inventory.groups == {"lab": ["gpu1"]}


def test_an_ssh_config_of_its_own_is_looked_for_beside_the_file(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("ssh_config: mine\ntargets: {a: {ssh: pve}}\n")
    with pytest.raises(ConfigError, match=rf"hosts.yaml: ssh_config: no such file: {tmp_path}/mine"):
        read_inventory(hosts)
    (tmp_path / "mine").write_text("Host pve\n")
    assert read_inventory(hosts).ssh_config == str(tmp_path / "mine")
