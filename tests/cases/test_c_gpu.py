"""C1, C2, C3, C5, C6 of the public cases: GPUs that are there for nvidia-smi, for root, or for yesterday's driver only.

nvidia-smi is a program that prints what the real one prints; the device files are real ones, of the null device.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.agent import gpu, main
from orchestrator.doctor.check import Outcome
from tests.driver import Specctl
from tests.patients import Patient

TWO = "0, NVIDIA GeForce RTX 3090, 37, 1024, 24576\n1, NVIDIA GeForce RTX 3090, 0, 3, 24576\n"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.195\n"
UNKNOWN = "Failed to initialize NVML: Unknown Error\n"
MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs-builder)\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
)
Smi = Callable[..., None]


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that every user can look into."""
    with tempfile.TemporaryDirectory(prefix="gpu-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def smi(open_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Call it with what nvidia-smi is to print, and its exit code."""
    folder = open_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def say(text: str, code: int = 0) -> None:
        fake_smi(folder, text, code)

    return say


def fake_smi(folder: Path, text: str, code: int = 0) -> None:
    (folder / "said").write_text(text)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat {folder}/said\nexit {code}\n")
    program.chmod(0o755)


@pytest.fixture
def dev(open_path: Path) -> Path:
    """A folder of device files: two GPUs and what they share."""
    if os.geteuid() != 0:
        pytest.skip("only root can make device files")
    folder = open_path / "dev"
    folder.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        os.mknod(folder / name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (folder / name).chmod(0o666)
    try:
        (folder / "nvidia0").open("rb").close()
    except OSError:
        pytest.skip("device files cannot be opened on this file system")
    return folder


def refused(dev: Path, declared: list[int], cuda: int = 0, module: Path | None = None) -> main.Refusal:
    with pytest.raises(main.Refusal) as caught:
        gpu.check(declared, cuda, dev=str(dev), module=str(module or dev / "none"))
    return caught.value


def test_what_is_free_and_who_is_there_is_said_at_launch(smi: Smi, dev: Path) -> None:
    smi(TWO)
    assert gpu.check([0, 1], 0, dev=str(dev)) == [
        "GPU 0 NVIDIA GeForce RTX 3090: 23,552 of 24,576 MiB free",
        "GPU 1 NVIDIA GeForce RTX 3090: 24,573 of 24,576 MiB free",
    ]
    assert gpu.check([], 0, dev="/nonexistent") == []


def test_c1_uvm_is_missing_although_nvidia_smi_is_content(smi: Smi, dev: Path) -> None:
    smi(TWO)
    (dev / "nvidia-uvm").unlink()
    refusal = refused(dev, [0])
    assert "nvidia-smi lists 2 GPUs, but" in refusal.message and "nvidia-uvm is not there" in refusal.message
    assert "nvidia-modprobe" in str(refusal.hint)


def test_c2_a_container_that_lost_its_gpus_is_to_be_restarted(smi: Smi, dev: Path) -> None:
    smi(UNKNOWN, 255)
    refusal = refused(dev, [0])
    assert "the container has lost its access to the GPUs" in refusal.message
    assert "restart the container" in str(refusal.hint)
    assert gpu.rows() == ([], "the container has lost its access to the GPUs (nvidia-smi: " + UNKNOWN.strip() + ")")


def test_c3_a_mismatch_names_both_versions(smi: Smi, dev: Path, tmp_path: Path) -> None:
    smi(MISMATCH, 18)
    (tmp_path / "version").write_text(MODULE)
    refusal = refused(dev, [0], module=tmp_path / "version")
    assert "kernel module is 570.124.06" in refusal.message and "the library here is 570.195" in refusal.message


@pytest.mark.parametrize(
    ("said", "code", "expected"),
    [
        ("No devices were found\n", 6, "nvidia-smi finds no GPU here"),
        ("No devices were found\n", 0, "nvidia-smi finds no GPU here"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n", 9, "the NVIDIA driver cannot be reached from here",
        ),
        ("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.\n", 12, "libraries are not installed"),
        ("Failed to initialize NVML: Insufficient Permissions\n", 4, "this user may not use the GPUs"),
        ("Unable to determine the device handle for GPU0000:01:00.0: GPU is lost.\n", 15, "fallen off the bus"),
        ("Segmentation fault\n", 139, "nvidia-smi fails (nvidia-smi: Segmentation fault)"),
        ("", 1, "nvidia-smi says nothing, exit code 1"),
    ],
)  # fmt: skip
def test_each_failure_of_nvidia_smi_is_said_in_plain_words(smi: Smi, said: str, code: int, expected: str) -> None:
    smi(said, code)
    rows, why = gpu.rows()
    assert rows == [] and expected in str(why)


def test_c6_what_root_can_open_and_the_runs_user_cannot_names_permissions_and_mapping(smi: Smi, dev: Path) -> None:
    smi(TWO)
    nobody = 65534
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        os.chown(dev / name, nobody, nobody)
        (dev / name).chmod(0o660)
    assert len(gpu.check([0], 0, dev=str(dev))) == 1, "root can"
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(1)
            os.setuid(1)
            said = refused(dev, [0])
            os.write(writing, f"{said.message} {said.hint}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    assert "cannot open" in text and "nvidia0: it belongs to nobody:" in text and "mode 0660" in text
    assert "device permissions or id mapping" in text


def test_a_gpu_that_is_not_there_is_named(smi: Smi, dev: Path) -> None:
    smi(TWO)
    assert "nvidia3 is not there" in refused(dev, [0, 3]).message
    os.mknod(dev / "nvidia3", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    assert "nvidia-smi knows no GPU 3 (it lists 0, 1)" in refused(dev, [3]).message
    refusal = refused(dev, [], cuda=4)
    assert "the configuration asks for 4 CUDA devices" in refusal.message and "nvidia2 is not there" in refusal.message


def test_a_container_that_has_the_third_gpu_only_has_it_as_number_0(smi: Smi, dev: Path) -> None:
    smi(TWO.splitlines()[0] + "\n")
    (dev / "nvidia1").unlink()
    (dev / "nvidia0").rename(dev / "nvidia2")
    for declared, cuda in (([0], 0), ([], 1)):
        assert gpu.check(declared, cuda, dev=str(dev)) == ["GPU 0 NVIDIA GeForce RTX 3090: 23,552 of 24,576 MiB free"]
    (dev / "nvidia2").unlink()
    os.mkfifo(dev / "nvidia2")
    assert "nvidia2 is no device" in refused(dev, [0]).message


def test_without_nvidia_smi_the_device_files_are_what_counts(dev: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.system, "search_path", lambda: "/nonexistent")
    assert "no nvidia-smi is here" in gpu.check([0], 0, dev=str(dev))[0]
    (dev / "nvidiactl").unlink()
    (dev / "nvidiactl").touch()
    assert "nvidiactl is no device" in refused(dev, [0]).message


def test_c3_a_running_run_stays_running_and_a_new_start_is_refused(specctl: Specctl, tmp_path: Path) -> None:
    program = specctl.program("steps.py")
    run_id = specctl.launch("--", sys.executable, program).json["run_id"]
    fake_smi(tmp_path, MISMATCH, 18)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = specctl("status", "--json", **environ)
    [row] = done.json["runs"]
    assert (row["run_id"], row["state"]) == (run_id, "RUNNING") and done.code == 0
    assert "driver/library version mismatch" in done.json["targets"][0]["gpus_error"]
    specctl.inventory.write_text(f"targets:\n  local: {{workdir: {specctl.workdir}, gpus: [0]}}\n")
    done = specctl("launch", "local", "--no-source", "--", "true", **environ)
    assert done.code == 1 and "driver/library version mismatch" in done.err and "570.195" in done.err
    assert specctl.status(run_id)["state"] == "RUNNING"


def test_c5_memory_that_stays_in_use_after_a_stop_is_reported(specctl: Specctl, tmp_path: Path) -> None:
    run_id = specctl.launch("--until", "process", "--", "sleep", "600").json["run_id"]
    record = specctl.run_dir(run_id) / "run.json"
    asked = json.loads(record.read_text())
    asked["spec"]["gpus"] = [0, 1]  # this machine has none that a launch would find
    record.write_text(json.dumps(asked))
    fake_smi(tmp_path, "0, NVIDIA GeForce RTX 3090, 0, 20480, 24576\n1, NVIDIA GeForce RTX 3090, 0, 3, 24576\n")
    done = specctl("stop", run_id, "--now", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.code == 0 and "no process of it is left" in done.out
    assert "GPU 0: 20,480 of 24,576 MiB are still in use" in done.out and "GPU 1" not in done.out
    again = specctl("stop", run_id, "--json", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert again.json["gpu_memory_kept"] == [], "of a run that had ended nothing can be said"


def test_a_configuration_that_names_more_gpus_than_are_declared_is_refused_at_once(specctl: Specctl) -> None:
    specctl.inventory.write_text(f"targets:\n  local: {{workdir: {specctl.workdir}, gpus: [2]}}\n")
    config = json.dumps({
        "steps": 1, "batch_size": 2, "devices": {"target": ["cuda:0"], "drafter": ["cuda:0", "cuda:1"]},
        "target": {"path": "/models/m"}, "data": {"kind": "python-docs", "sequence_length": 64},
        "drafter": {"layers": 1, "block_size": 8, "anchors": 4, "mask_token_id": 3}, "optimizer": {"lr": "1e-3"},
    })  # fmt: skip
    (specctl.project / "c.yaml").write_text(config.replace('"1e-3"', "0.001"))
    done = specctl("launch", "local", "--config", "c.yaml")
    assert done.code == 2 and "cuda:1" in done.err and "only GPU 2" in done.err, done.err


def says(told: dict[str, str | None], node: dict[str, str | None] | None = None) -> dict[str, Outcome]:
    """What the doctor finds amiss in a container that answers so, on a node that does."""
    found = Patient(check="", told=told, node=node or {}).found()
    return {check: outcome for check, outcome in found if outcome.status not in ("ok", "unknown")}


BLIND = 'specctl-torch {"version": "2.9", "cuda": "12.8", "available": false, "count": 0, "why": "CUDA error 999"}'
NO_UVM: dict[str, str | None] = {"device nvidia-uvm": None, "opens /dev/nvidia-uvm": None}


def test_c1_the_doctor_asks_torch_and_names_the_device_that_it_lacks() -> None:
    found = says({**NO_UVM, "torch": BLIND})
    assert set(found) == {"devices", "torch"}
    assert "sees no GPU, though nvidia-smi lists 2: /dev/nvidia-uvm is not there" in found["torch"].what
    assert found["torch"].evidence == "CUDA error 999" and "/dev/nvidia-uvm,mode=0666" in found["torch"].mend
    restarted = says({"torch": BLIND})  # every device opens, and still: the node was restarted, its module was late
    assert set(restarted) == {"torch"} and "nvidia-modprobe -c 0 -u && pct reboot 200" in restarted["torch"].mend


def test_c2_the_doctor_looks_at_the_nodes_own_gpus_before_it_blames_the_container() -> None:
    lost = {"smi": UNKNOWN.strip(), "smi-code": "255"}
    here = says(lost)["driver"]
    assert "the container has lost its access to the GPUs" in here.what and "the node's own lists 2" in here.evidence
    assert here.mend == "ssh root@pve1 pct reboot 200"
    both = says(lost, {**lost})["driver"]
    assert "the node's own Failed to initialize NVML" in both.evidence and "pct reboot" not in both.mend


def test_c3_the_doctor_names_both_versions_and_who_is_to_be_changed() -> None:
    mismatch: dict[str, str | None] = {"smi": MISMATCH.strip(), "smi-code": "18"}
    here = says(mismatch)["driver"]
    assert "kernel module is 570.124.06" in here.what and "the library here is 570.195" in here.what
    assert "NVIDIA-Linux-x86_64-570.124.06.run" in here.mend and "--no-kernel-modules" in here.mend
    assert says(mismatch, {**mismatch})["driver"].mend.startswith("ssh root@pve1 reboot"), "the node is the one"


def test_c6_the_doctor_sees_with_the_eyes_of_the_runs_user() -> None:
    nobodys = "\n".join(f"crw-rw---- 1 nobody nogroup 195, {n} Nov 30 03:10 /dev/nvidia{n}" for n in (0, 1))
    rest = "\n".join(f"crw-rw-rw- 1 root root 195, 9 Nov 30 03:10 /dev/{name}" for name in ("nvidiactl", "nvidia-uvm"))
    closed = {f"opens /dev/nvidia{n}": f"/dev/nvidia{n} Permission denied" for n in (0, 1)}
    found = says({"device": f"{nobodys}\n{rest}", **closed})
    assert set(found) == {"devices"} and "train cannot open /dev/nvidia0" in found["devices"].what
    assert "nobody is an id that the container does not map" in found["devices"].what
    assert "mode 0660" in found["devices"].what and "nvidia-smi lists 2 GPUs" in found["devices"].evidence
