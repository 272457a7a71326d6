"""The house rules that a machine can hold: who may import whom, and what travels into a container."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import remote
from orchestrator.agent.main import VERBS

ROOT = Path(__file__).parents[2]
PURE = [
    "record", "model", "errors", "ailments", "frames", "manifest", "health", "blame", "ladder", "comparison", "series",
    "timeline", "logscan", "unexplained",
]  # fmt: skip
IMPURE = {"paramiko", "libtmux", "subprocess", "time", "os", "socket", "threading"}


def imports(path: Path) -> set[str]:
    """Every module that the file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def sources(*names: str) -> list[Path]:
    paths: list[Path] = []
    for name in names:
        path = ROOT / name
        paths += sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    assert paths
    return paths


def uses(path: Path, package: str) -> bool:
    return any(name == package or name.startswith(package + ".") for name in imports(path))


@pytest.mark.parametrize("path", sources(*(f"orchestrator/{name}" for name in PURE)), ids=str)
def test_pure_modules_touch_no_clock_process_or_file(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & IMPURE
    allowed = {f"orchestrator.{name}" for name in PURE}
    for name in imports(path):
        if name.startswith("orchestrator."):
            assert any(name == module or name.startswith(module + ".") for module in allowed), name


@pytest.mark.parametrize("path", sources("orchestrator/doctor"), ids=str)
def test_the_doctor_judges_what_others_have_seen(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & IMPURE
    for above in ("verbs", "render", "cli", "fleet", "remote"):
        assert not uses(path, f"orchestrator.{above}")


@pytest.mark.parametrize("path", sources("orchestrator/agent"), ids=str)
def test_the_agent_imports_only_what_travels_with_it(path: Path) -> None:
    travelling = {name.removesuffix(".py") for name in remote.TRAVELS}
    for name in imports(path):
        top, *rest = name.split(".")
        assert top in sys.stdlib_module_names or top in ("orchestrator", "libtmux"), name
        assert top != "orchestrator" or not rest or rest[0] in travelling, name


@pytest.mark.parametrize("path", sources("orchestrator/agent"), ids=str)
def test_only_start_imports_libtmux(path: Path) -> None:
    assert not uses(path, "libtmux") or path.name == "start.py"


@pytest.mark.parametrize("path", sources("orchestrator/transport"), ids=str)
def test_transports_know_nothing_of_verbs_agents_or_rendering(path: Path) -> None:
    for above in ("verbs", "render", "cli", "agent", "health", "remote", "fleet"):
        assert not uses(path, f"orchestrator.{above}")


@pytest.mark.parametrize("path", sources("orchestrator/verbs"), ids=str)
def test_verbs_never_render(path: Path) -> None:
    assert not uses(path, "orchestrator.render") and not uses(path, "rich") and not uses(path, "typer")


@pytest.mark.parametrize("path", sources("orchestrator", "trainer", "typedyaml"), ids=str)
def test_trainer_and_orchestrator_never_import_each_other(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for other in {"orchestrator", "trainer"} - {package}:
        assert not uses(path, other)


ROOMS = {
    "data": ("export", "report", "plan", "doctor", "train", "replica"),
    "model": ("export", "data", "report", "plan", "doctor", "train", "replica"),
    "report": ("export", "data", "plan", "doctor", "train"),
    "plan": ("export", "report", "doctor", "train", "replica"),
    "doctor": ("train",),
    "export": ("data", "report", "plan", "doctor", "train", "replica"),
}
"""The rooms of the trainer, and what lies beyond each."""
BEFORE_A_RUN = ("__main__.py", "bench.py")


@pytest.mark.parametrize("path", sources("trainer"), ids=str)
def test_a_room_of_the_trainer_knows_nothing_of_what_is_made_of_it(path: Path) -> None:
    room = path.relative_to(ROOT / "trainer").parts[0]
    beyond = ROOMS.get(room, () if room in BEFORE_A_RUN else ("plan", "doctor"))
    assert not [name for name in beyond if uses(path, f"trainer.{name}") and name != room]


def test_the_reference_decoder_is_independent_of_all_that_trains() -> None:
    assert not uses(ROOT / "trainer" / "export" / "reference.py", "trainer")
    code = "import sys, trainer.export.reference; print(*(name for name in sys.modules if name.startswith('trainer.')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["trainer.export", "trainer.export.reference"]


@pytest.mark.parametrize("path", sources("orchestrator"), ids=str)
def test_only_the_command_line_and_rendering_print(path: Path) -> None:
    relative = path.relative_to(ROOT / "orchestrator")
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    prints = any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)
    assert not prints or relative.parts[0] in ("cli", "render")


def test_the_agent_runs_from_its_travelling_files_alone(tmp_path: Path) -> None:
    for name, content in remote.agent_files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    verbs = [*VERBS, "supervise"]
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + "\n".join(
        f"import orchestrator.agent.{verb}" for verb in verbs
    )
    code += "\nimport libtmux, orchestrator; assert orchestrator.__file__.startswith(" + repr(str(tmp_path)) + ")"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, cwd=tmp_path)


def test_the_repository_names_no_path_of_a_developers_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    marks = [b"/" + b"work/", b"/home/" + b"runner"]
    offenders = [
        name.decode()
        for name in listed
        if name and (path := ROOT / name.decode()).is_file() and any(mark in path.read_bytes() for mark in marks)
    ]
    assert not offenders
