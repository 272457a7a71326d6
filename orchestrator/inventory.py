"""hosts.yaml -> `Inventory` of `Target`s: where runs may live, strictly typed by the schema.

The laptop side reads it once per command. Every mistake is one `ConfigError` line with file, line and key; a name that
is not in it is a `NotFound` with the candidates. The environment is a parameter, so that nothing here depends on the
process it runs in.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from orchestrator.errors import Ambiguous, ConfigError, NotFound
from orchestrator.record import record
from typedyaml import Int, Model, ProblemAt, Str, TypedYamlError, load, loads

DEFAULT_WORKDIR = "~/.specctl"
VARIABLE = "SPECCTL_INVENTORY"

Attach = Literal["auto", "pct", "lxc"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?")
_BLANK = re.compile(r"[\s\x00-\x1f\x7f]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@record
class Target:
    """One place where runs live: a node (an SSH host, or this machine), and perhaps a container of it."""

    name: str
    ssh: str | None = None
    """ssh_config alias or `[user@]host[:port]`; None is this machine."""
    vmid: int | None = None
    """The container, entered through `pct` on the node; None is the node itself."""
    attach: Attach = "auto"
    """How a container is entered to look at it. What starts something there goes through pct, unless this is lxc."""
    workdir: str = DEFAULT_WORKDIR
    """As written: a leading `~` is the home directory on the target, and only the target can expand it."""
    python: str | None = None
    """The Python that runs agent and trainer there; None: `python3`, and for the trainer an environment made for it."""
    user: str | None = None
    """Who runs there, when the login is root's; None: the login itself."""
    gpus: list[int] | None = None
    """What its runs see as CUDA_VISIBLE_DEVICES; a launch then wants to see them held."""
    claims_dir: str | None = None
    """Where claims of GPUs are kept, which containers of one node may share; None: each for itself."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of every run's environment."""
    secrets: list[str] = field(default_factory=list)
    """Names only; the values are in the caller's environment."""

    @property
    def place(self) -> str:
        """Where it is, for people: `container 200 on pve1`."""
        node = self.ssh or "this machine"
        return node if self.vmid is None else f"container {self.vmid} on {node}"


@record
class Inventory:
    """All targets and groups of one hosts.yaml, in its order."""

    source: str
    """The file it came from, or the words that say that there is none."""
    builtin: bool
    """No file was found, and only `local` is known."""
    targets: dict[str, Target]
    groups: dict[str, list[str]] = field(default_factory=dict)
    default_target: str | None = None
    ssh_config: str | None = None
    """What stands in for the user's own ssh_config, as a path that any program here can open."""

    def resolve(self, name: str | None) -> Target:
        """The target called `name`; without a name the default one, or the only one.

        Raises `NotFound` with the candidates, or `Ambiguous` when no name was given (or a group's) and several fit.
        """
        if name is None:
            if self.default_target is not None:
                return self.targets[self.default_target]
            if len(self.targets) == 1:
                return next(iter(self.targets.values()))
            raise Ambiguous(
                f"no target was named and {self.source} has no default_target; it knows {', '.join(self.targets)}",
                hint="name one, or set default_target",
            )
        if name in self.targets:
            return self.targets[name]
        if name in self.groups:
            members = ", ".join(self.groups[name])
            raise Ambiguous(f"{name!r} is a group ({members}); this needs one target", hint="name one of its members")
        raise self._unknown(name, list(self.targets), "target")

    def expand(self, names: Iterable[str]) -> list[Target]:
        """The targets that `names` (of targets or groups) stand for, each once, in the order given."""
        wanted: dict[str, Target] = {}
        for name in names:
            if name not in self.targets and name not in self.groups:
                raise self._unknown(name, [*self.targets, *self.groups], "target or group")
            for member in [name] if name in self.targets else self.groups[name]:
                wanted[member] = self.targets[member]
        return list(wanted.values())

    def _unknown(self, name: str, known: list[str], kind: str) -> NotFound:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "add it to hosts.yaml, or name one of those"
        return NotFound(f"no {kind} {name!r} in {self.source}; it knows {', '.join(known)}", hint=hint)


def load_inventory(explicit: str | None, *, environ: Mapping[str, str], cwd: Path, home: Path) -> Inventory:
    """The inventory of `--inventory` (`explicit`), `$SPECCTL_INVENTORY`, `./hosts.yaml` or the home directory's, in
    that order; with none of them, one that knows only `local`. Raises `ConfigError`."""
    for given, origin in ((explicit, "--inventory"), (environ.get(VARIABLE), f"${VARIABLE}")):
        if given:
            path = cwd / Path(given).expanduser()
            if path.is_dir():
                raise ConfigError(f"{given}: is a directory, not a hosts.yaml", hint=f"{origin} names it")
            if not path.exists():
                raise ConfigError(f"{given}: no such file", hint=f"{origin} names it")
            return read_inventory(path, name=given)
    candidates = (cwd / "hosts.yaml", home / ".config" / "specctl" / "hosts.yaml")
    for path in candidates:
        if path.is_file():
            return read_inventory(path, name="hosts.yaml" if path == candidates[0] else str(path))
    looked = "./hosts.yaml or ~/.config/specctl/hosts.yaml"
    local = Target(name="local")
    return Inventory(
        source=f"the built-in inventory (there is no {looked})",
        builtin=True,
        targets={"local": local},
        default_target="local",
    )


def read_inventory(path: Path, *, name: str | None = None) -> Inventory:
    """The inventory of the file at `path`, called `name` in messages. Raises `ConfigError`."""
    try:
        inventory = _inventory(load(path, HostsFile, name=name), name or str(path))
    except TypedYamlError as error:
        raise ConfigError(str(error)) from error
    if inventory.ssh_config is None:
        return inventory
    config = path.parent.absolute() / Path(inventory.ssh_config).expanduser()
    if not config.is_file():
        raise ConfigError(f"{inventory.source}: ssh_config: no such file: {config}", hint="a path beside this file")
    return replace(inventory, ssh_config=str(config))


def parse_inventory(text: str, name: str = "hosts.yaml") -> Inventory:
    """The inventory that `text` describes. Raises `ConfigError`."""
    try:
        return _inventory(loads(text, HostsFile, name), name)
    except TypedYamlError as error:
        raise ConfigError(str(error)) from error


# --- the schema of the file -----------------------------------------------------------------------------------------


class Entry(Model):
    """What may be said of a target, and in `defaults` of every target that does not say it itself."""

    ssh: Str | None = Field(
        default=None,
        description="The node: an ssh_config alias, or [user@]host[:port]. ~/.ssh/config applies. Left out: this "
        "machine. For a container it is the Proxmox node, as root or as a user whose sudo lets `pct exec` through "
        "(docs/proxmox-access.md).",
    )
    vmid: Annotated[Int, Field(ge=100, le=999_999_999)] | None = Field(
        default=None,
        description="The number of a container on that node, as `pct list` shows it. Left out: the node itself. Not a "
        "virtual machine's: those are reached by an address of their own as ssh.",
    )
    attach: Attach = Field(
        default="auto",
        description="By which program of the node a container is entered. auto: what only looks (status, logs) takes "
        "lxc-attach where the login is root, which costs the node 7 ms instead of half a second, and pct otherwise; "
        "what starts or changes something takes pct. pct: always pct. lxc: always lxc-attach.",
    )
    workdir: Str = Field(
        default=DEFAULT_WORKDIR,
        description="The folder on the target that holds specctl's own files: agents, code, environments, runs. An "
        "absolute path, or one that starts with ~/, the home directory there of the user that runs are started as. Two "
        "targets of one machine may share it or not.",
    )
    python: Str | None = Field(
        default=None,
        description="The Python on the target that runs specctl's agent and the trainer: an absolute path, such as a "
        "virtual environment's bin/python, or a bare name. Left out: python3, and a virtual environment made under the "
        "workdir for what the trainer needs.",
    )
    user: Str | None = Field(
        default=None,
        description="The user of the target that runs are started as; who logs in must be that user, or root. Left "
        "out: who logs in, which in a container is its root.",
    )
    gpus: list[Int] | None = Field(
        default=None,
        description="The GPUs that runs may have, by their numbers in nvidia-smi there: a run claims them, or as many "
        "of them as its configuration counts on, or --gpus asks for, and sees no others. Left out or empty: all of "
        "them.",
    )
    claims_dir: Str | None = Field(
        default=None,
        description="The folder on the target where runs claim their GPUs. Mounted from the node into all of its "
        "containers that have the same GPUs, it keeps their runs apart, too (docs/gpu-claims.md). An absolute path, of "
        "a folder that is there. Left out: /run/lock/specctl-gpus, which each container has for itself.",
    )
    env: dict[Str, Str] = Field(
        default_factory=dict,
        description="Environment variables of every run there, passed on byte for byte. Merged with those of defaults.",
    )
    secrets: list[Str] = Field(
        default_factory=list,
        description="Names of variables that every run there gets from your own environment at launch. Their values "
        "are kept out of this file, of argv, logs and records.",
    )

    @field_validator("ssh")
    @classmethod
    def _ssh(cls, value: str | None) -> str | None:
        # A leading dash would be read as an option by ssh.
        if value is not None and (not value or value.startswith("-") or _BLANK.search(value)):
            raise ValueError(f"needs an ssh_config alias or [user@]host[:port], is {value!r}")
        return value

    @field_validator("workdir")
    @classmethod
    def _workdir(cls, value: str) -> str:
        if not (value.startswith(("/", "~/")) or value == "~") or _CONTROL.search(value):
            raise ValueError(f"needs an absolute path, or one that starts with ~/, is {value!r}")
        return value if value in ("/", "~/") else value.rstrip("/")

    @field_validator("claims_dir")
    @classmethod
    def _claims_dir(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith("/") or _CONTROL.search(value)):
            raise ValueError(f"needs the absolute path of a folder on the target, is {value!r}")
        return value

    @field_validator("python")
    @classmethod
    def _python(cls, value: str | None) -> str | None:
        relative = value is not None and "/" in value and not value.startswith("/")
        if value is not None and (not value or relative or value.startswith("-") or _CONTROL.search(value)):
            raise ValueError(f"needs the absolute path of a Python on the target, is {value!r}")
        return value

    @field_validator("user")
    @classmethod
    def _user(cls, value: str | None) -> str | None:
        if value is not None and not _USER.fullmatch(value):
            raise ValueError(f"needs the name of a user on the target, is {value!r}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Entry:
        for index, gpu in enumerate(self.gpus or []):
            if gpu < 0:
                raise ProblemAt(("gpus", index), f"needs the number of a GPU (0 or more), is {gpu}")
            if gpu in (self.gpus or [])[:index]:
                raise ProblemAt(("gpus", index), f"names GPU {gpu} twice")
        for name, value in self.env.items():
            if not _VARIABLE.fullmatch(name):
                raise ProblemAt(("env", name), "is not the name of an environment variable")
            if name.startswith("SPECCTL_"):
                raise ProblemAt(("env", name), "is specctl's own: it marks the processes of a run")
            if "\x00" in value:
                raise ProblemAt(("env", name), "holds a NUL character, which no environment can carry")
        for index, name in enumerate(self.secrets):
            if not _VARIABLE.fullmatch(name):
                raise ProblemAt(("secrets", index), "needs the name of an environment variable, never its value")
        return self


class HostsFile(Model):
    """hosts.yaml: where runs may live. Every value is read as text, and typed by its key."""

    default_target: Str | None = Field(
        default=None, description="The target that is meant where none is named. Not needed if there is only one."
    )
    defaults: Entry = Field(
        default=Entry(),
        description="Keys for every target that does not have them itself. A list replaces a list, env is merged by "
        "name, and an empty value (`ssh: null`) in a target undoes a default.",
    )
    targets: dict[Str, Entry] = Field(
        description="The targets by name: letters, digits, dots, dashes and underscores. {} is this machine."
    )
    groups: dict[Str, list[Str]] = Field(
        default_factory=dict, description="Names for several targets at once, for status and ls."
    )
    ssh_config: Str | None = Field(
        default=None,
        description="An ssh_config that is read in place of ~/.ssh/config for the nodes of this file; a path that is "
        "not absolute starts at this file's folder.",
    )

    @field_validator("ssh_config")
    @classmethod
    def _ssh_config(cls, value: str | None) -> str | None:
        if value is not None and (not value or _CONTROL.search(value)):
            raise ValueError(f"needs the path of an ssh_config, is {value!r}")
        return value

    @model_validator(mode="after")
    def _names_exist(self) -> HostsFile:
        if not self.targets:
            raise ProblemAt(("targets",), "needs at least one target, such as `local: {}`")
        for section, names in (("targets", self.targets), ("groups", self.groups)):
            for name in names:
                if not _NAME.fullmatch(name):
                    raise ProblemAt((section, name), "a name is letters, digits, dots, dashes and underscores")
        for name, entry in self.targets.items():
            merged = _merged(self.defaults, entry)
            if merged["vmid"] is None and "attach" in entry.model_fields_set:
                raise ProblemAt(
                    ("targets", name, "attach"), "is how a container is entered, and this target has no vmid"
                )
            for secret in merged["secrets"]:
                if secret in merged["env"]:
                    raise ProblemAt(("targets", name), f"{secret} is both in env and in secrets; keep one of them")
        for group, members in self.groups.items():
            if group in self.targets:
                raise ProblemAt(("groups", group), "is also the name of a target; a group needs one of its own")
            for index, member in enumerate(members):
                if member not in self.targets:
                    raise ProblemAt(("groups", group, index), _no_target(member, self.targets))
        if self.default_target is not None and self.default_target not in self.targets:
            raise ProblemAt(("default_target",), _no_target(self.default_target, self.targets))
        return self


def _no_target(name: str, targets: Iterable[str]) -> str:
    known = list(targets)
    near = difflib.get_close_matches(name, known, n=1)
    return f"no target {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}")


def _merged(defaults: Entry, entry: Entry) -> dict[str, Any]:
    """The fields of a target: its own, then the defaults'. `env` is merged by name; a list replaces a list."""
    values = {key: getattr(entry if key in entry.model_fields_set else defaults, key) for key in Entry.model_fields}
    values["env"] = {**defaults.env, **entry.env}
    return values


def _inventory(hosts: HostsFile, source: str) -> Inventory:
    return Inventory(
        source=source,
        builtin=False,
        targets={name: Target(name=name, **_merged(hosts.defaults, entry)) for name, entry in hosts.targets.items()},
        groups=dict(hosts.groups),
        default_target=hosts.default_target,
        ssh_config=hosts.ssh_config,
    )
