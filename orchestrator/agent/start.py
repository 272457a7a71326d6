"""`start`: from a verified bundle to a supervised program, exactly once for one run id.

A launch whose reply was lost is repeated by the laptop; the second call finds the first one's record and adopts it. A
lock file, not tmux's name check, decides who is first: a second tmux server would accept the same name again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shlex
import shutil
import sys
import time

from orchestrator.agent import clock, files, prepare, proc, put, records, system, tmux
from orchestrator.agent.main import Call, Refusal, describe, hint_of
from orchestrator.model import SCHEMA_VERSION, ExitRecord, RunPaths, RunSpec, from_json, is_run_id, to_json

SESSION_S = 10.0
"""How long the supervisor may take to open the log and spawn the program."""


def run(call: Call) -> None:
    spec = from_json(RunSpec, call.request["spec"])
    if not is_run_id(spec.run_id):
        raise Refusal("bug", f"{spec.run_id!r} is not a run id")
    paths = call.paths.run(spec.run_id)
    os.makedirs(os.path.dirname(paths.root), exist_ok=True)
    # What is shipped may hold what is nobody else's business (a .env, say): the folder is this user's alone.
    os.makedirs(paths.root, mode=0o700, exist_ok=True)
    with open(paths.start_lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            adopted = _record(call, spec, paths)
        except OSError:
            if not os.path.lexists(paths.record):
                shutil.rmtree(paths.root, ignore_errors=True)
            raise
        if records.supervisor(paths) is None and records.exit_record(paths) is None:
            why = call.request.get("refused") or _begin(call, spec, paths)
            if why is not None:
                _never_started(spec, paths, why)
    ended = records.exit_record(paths)
    call.emit({
        "final": True, "adopted": adopted, "root": paths.root, "log": paths.log(1), "session": spec.run_id,
        "now": time.time(), "never_started": ended.never_started if ended else None,
    })  # fmt: skip


def _never_started(spec: RunSpec, paths: RunPaths, why: str) -> None:
    """Records why. What was laid out goes first: it may hold secrets, and on a full disk its room is needed. Raises
    `Refusal`, and leaves nothing, when there is no room even so."""
    shutil.rmtree(paths.code, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(paths.env)
    for record in (paths.stop, paths.stopper, paths.scan):
        files.give_back(record)
    try:
        files.claim(paths.claim, "start")
        ending = ExitRecord(at=time.time(), never_started=why, nonce=spec.nonce)
        files.create_reserved(paths.exit, to_json(ending))
    except OSError as error:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise Refusal("preflight", f"{why}; nothing was started, and no record kept", hint_of(error)) from error


def _begin(call: Call, spec: RunSpec, paths: RunPaths) -> str | None:
    """From the record to the session; why that could not be done, or None."""
    try:
        found, socket = tmux.find(), tmux.socket_of(call.paths)
        bundle = call.paths.bundle(spec.bundle)
        put.verify(bundle, spec.bundle)
        if spec.env_hash is not None and not prepare.is_made(call.paths.env(spec.env_hash)):
            return f"environment {spec.env_hash} is not on the target any more (launch again: it is then made)"
        _lay_out(call, spec, paths, bundle)
        _session(found, socket, spec, paths)
    except Refusal as refusal:
        return f"{refusal.message} ({refusal.hint})" if refusal.hint else refusal.message
    except OSError as error:
        return describe(error, call.paths.workdir)
    return None


def _record(call: Call, spec: RunSpec, paths: RunPaths) -> bool:
    """Makes run.json, once. Returns whether it was there: this call then adopts what another has begun."""
    existing = files.read_json(paths.record)
    if existing is not None:
        if existing["spec"]["nonce"] != spec.nonce:
            raise Refusal("preflight", f"run id {spec.run_id} is taken by another launch", "launch again")
        return True
    versions = {
        "python": platform.python_version(), "tmux": tmux.version(), "kernel": platform.release(),
        "specctl": spec.specctl_version,
    }  # fmt: skip
    files.create_json(
        paths.record,
        {
            "schema_version": SCHEMA_VERSION,
            "spec": to_json(spec),
            "argv": [word.replace("{config}", paths.config) for word in spec.argv] if spec.trainer else spec.argv,
            "cwd": paths.code,
            "created_at": time.time(),
            "boot": proc.boot_identity(),
            "booted_at": clock.booted_at(),
            "workdir": call.paths.workdir,
            "host": os.uname().nodename,
            "versions": versions,
        },
    )
    return False


def _lay_out(call: Call, spec: RunSpec, paths: RunPaths, bundle: str) -> None:
    """The run's own copy of the code, its configuration, and the environment that its supervisor will read."""
    shutil.rmtree(paths.code, ignore_errors=True)
    project = os.path.join(bundle, "project")
    if os.path.isdir(project):
        shutil.copytree(project, paths.code, symlinks=True)
    else:
        os.makedirs(paths.code)
    if spec.config_text is not None:
        files.write_whole(paths.config, spec.config_text.encode("utf-8"))
    environ = environment(call, spec, paths, bundle)
    items = (os.fsencode(name) + b"=" + os.fsencode(value) for name, value in environ.items())
    files.write_whole(paths.env, b"\0".join(items), mode=0o600)
    # A full disk must not keep the run from being stopped, nor from saying how far it is and how it has ended.
    for record in (paths.stop, paths.stopper, paths.scan, paths.exit):
        files.reserve(record)
    with open(paths.stop_lock, "a"):
        pass


def environment(call: Call, spec: RunSpec, paths: RunPaths, bundle: str) -> dict[str, str]:
    """What the program is given, secrets included."""
    environ = system.base_environ(scrub=bool(call.request.get("scrub")))
    python = call.request.get("python")
    if spec.env_hash is not None:
        python = os.path.join(call.paths.env(spec.env_hash), "bin", "python")
        environ["VIRTUAL_ENV"] = call.paths.env(spec.env_hash)
    if python:
        environ["PATH"] = os.path.dirname(python) + os.pathsep + environ["PATH"]
    if spec.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in spec.gpus)
    # Bytecode beside the bundle's files would change what the bundle's hash says of them.
    environ["PYTHONPYCACHEPREFIX"] = os.path.join(call.paths.workdir, "pycache")
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (f"{bundle}/trainer", environ.get("PYTHONPATH"))))
    environ.update(spec.env)
    environ.update({str(name): str(value) for name, value in (call.request.get("secrets") or {}).items()})
    environ.update(
        PYTHONUNBUFFERED="1", SPECCTL_RUN_ID=spec.run_id, SPECCTL_RUN_DIR=paths.root, SPECCTL_ATTEMPT="1",
        SPECCTL_NONCE=spec.nonce,
    )  # fmt: skip
    return environ


def _session(found: tmux.Tmux, socket: str, spec: RunSpec, paths: RunPaths) -> None:
    """Starts the supervisor as the command of a tmux session of the run's exact name, and waits for its record."""
    # The server keeps the environment of whoever starts it, for all later sessions: give it a plain one. libtmux reads
    # its separator when it is imported; the default is not ASCII, and a client without a UTF-8 locale mangles it.
    keep = {name: os.environ[name] for name in ("HOME", "USER", "LOGNAME") if name in os.environ}
    os.environ.clear()
    os.environ.update(keep, PATH=os.pathsep.join(system.PATH), LC_ALL=found.locale, SHELL="/bin/sh", TERM="screen")
    os.environ["LIBTMUX_TMUX_FORMAT_SEPARATOR"] = "|+|"
    import libtmux

    server = libtmux.Server(socket_path=socket, config_file="/dev/null", tmux_bin=found.program)
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    entry = (
        f"import sys; sys.path.insert(0, {home!r}); from orchestrator.agent.supervise import main; "
        f"sys.exit(main({paths.root!r}))"
    )
    argv = [sys.executable, "-I", "-S", "-c", entry]
    said = ""
    if not _session_exists(server, spec.run_id):
        try:
            server.new_session(
                session_name=spec.run_id, window_command=shlex.join(argv), start_directory="/", attach=False
            )
        except Exception as error:  # libtmux may raise after the session was made: what counts is what is there
            said = f"{type(error).__name__}: {error}"
    deadline = time.monotonic() + SESSION_S
    while time.monotonic() < deadline:
        record = records.supervisor(paths)
        if (record is not None and record.program_pid is not None) or records.exit_record(paths) is not None:
            return
        if record is not None and (claim := records.gpu_claim(paths, spec.nonce)) is not None and claim.waiting:
            return
        if record is None and said and not _session_exists(server, spec.run_id):
            raise Refusal("preflight", f"tmux could not start the session: {said}")
        time.sleep(0.02)
    if records.supervisor(paths) is None and files.claim(paths.claim, "start"):
        where = "the session is there" if _session_exists(server, spec.run_id) else "the session is gone"
        raise Refusal("preflight", f"the supervisor did not report within {SESSION_S:.0f} s ({where})", said or None)


def _session_exists(server: object, name: str) -> bool:
    """By exact name: tmux itself would take a prefix for the whole."""
    try:
        return any(session.session_name == name for session in server.sessions)  # type: ignore[attr-defined]
    except Exception:  # no server yet
        return False
