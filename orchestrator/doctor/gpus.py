"""Checks of GPUs: device files as the run's user meets them, the driver, and whether torch sees what nvidia-smi does.

nvidia-smi is content with less than CUDA needs, and root with less than the run's user; only torch, as that user and in
the environment that will be used, is asked what counts. Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from orchestrator import ailments
from orchestrator.ailments import COMMON_DEVICES, Ailment, Device
from orchestrator.doctor.check import Check, Examined, Outcome, Status, ok
from orchestrator.doctor.script import SMI_S, TORCH_S

PASSTHROUGH = (5, 0, 9)
"""pve-container from which on `pct set -devN` passes a device on."""
KILLED = 137


def devices(examined: Examined) -> Iterator[Outcome]:
    seen = examined.seen
    if not examined.has_gpus:
        yield ok("no GPU is there, and hosts.yaml declares none")
        return
    if "/dev/dxg" in seen.text("device"):
        yield ok("/dev/dxg: the GPUs of a Windows host")
        return
    found, troubles = seen.devices, list(_troubles(examined))
    listed = ", ".join(found) or "no /dev/nvidia*"
    count = len(seen.gpus)
    smi = f"; nvidia-smi lists {count} GPU{'' if count == 1 else 's'}" if count else ""
    for kind in dict.fromkeys(ailment.kind for _, ailment in troubles):
        alike = [(device, ailment) for device, ailment in troubles if ailment.kind == kind]
        details = [detail for device, _ in alike if (detail := _listing(examined, device))] or [f"there is {listed}"]
        said = {f"; opening it says: {device.refusal}" for device, _ in alike if device.refusal}
        yield Outcome(
            status=_severity(examined), what="; ".join(ailment.what for _, ailment in alike),
            evidence=f"{', '.join(details)}{''.join(said)}{smi}",
            mend=_mend(examined, kind, [device for device, _ in alike]),
        )  # fmt: skip
    if not troubles:
        yield ok(f"{seen.user} can open {listed}")


def _troubles(examined: Examined) -> Iterator[tuple[Device, Ailment]]:
    """Each device file that CUDA would need and that this user cannot use."""
    seen = examined.seen
    found = seen.devices
    there = {int(match[1]) for path in found if (match := re.fullmatch(r"/dev/nvidia(\d+)", path))}
    numbers = examined.target.gpus or sorted(there | {gpu.index for gpu in seen.gpus if gpu.index is not None})
    for name in (*(f"nvidia{number}" for number in numbers), *COMMON_DEVICES):
        device = found.get(f"/dev/{name}", Device(path=f"/dev/{name}", there=False))
        ailment = ailments.device(device, seen.user, seen.groups)
        if ailment is not None:
            yield device, ailment


def _severity(examined: Examined) -> Status:
    return "fail" if examined.wants_gpus else "warn"


def _listing(examined: Examined, device: Device) -> str:
    return next((row for row in examined.seen.all("device") if row.endswith(f" {device.path}")), "")


def _mend(examined: Examined, kind: str, devices: list[Device]) -> str:
    """What mends the same trouble of all these devices."""
    hands, vmid, node = examined.hands, examined.target.vmid, examined.node
    paths = [device.path for device in devices]
    if kind == "group":
        return hands.inside(f"usermod -aG {devices[0].group} {examined.seen.user}")
    if vmid is None:
        if kind in ("missing", "file"):
            remove = f"rm {' '.join(paths)} && " if kind == "file" else ""
            return hands.inside(f"{remove}modprobe nvidia && nvidia-modprobe -c 0 -u")
        return hands.inside(f"chmod 666 {' '.join(paths)}") if kind == "mode" else hands.restart()
    if kind == "closed":
        return hands.on_node("dmesg | grep -i nvrm | tail")
    if kind == "rules" or node is None:
        return hands.restart()
    steps = []
    if kind == "missing" and any(path not in node.all("device") for path in paths):
        # Nothing can be passed on that the node itself does not have.
        steps.append("modprobe nvidia && nvidia-modprobe -c 0 -u")
    if kind == "file":
        steps.append(f"pct exec {vmid} -- rm {' '.join(paths)}")
    conf = node.all("conf")
    if not conf:  # the login may not read it, and to guess could take a device from its entry
        news = " ".join(f"-devN {path},mode=0666" for path in paths)
        return (
            f"{hands.on_node(f'pct config {vmid}')}   # then pass on what lacks: pct set {vmid} {news}, each with a "
            f"number N that is free there, and pct reboot {vmid}"
        )
    if node.all("version") and _version(node.all("version")) < PASSTHROUGH:
        lines = [f"lxc.mount.entry: {path} {path[1:]} none bind,optional,create=file" for path in paths]
        steps += [f"sed -i '1i {line}' /etc/pve/lxc/{vmid}.conf" for line in lines]
    else:
        options = []
        for path in paths:
            slot = _slot(conf, path)
            conf = [*conf, f"{slot}: {path}"]
            options.append(f"-{slot} {path},mode=0666")
        steps.append(f"pct set {vmid} {' '.join(options)}")
    return hands.on_node(" && ".join([*steps, f"pct reboot {vmid}"]))


def _version(rows: list[str]) -> tuple[int, ...]:
    text = next((row for row in rows if row.startswith("pve-container ")), "")
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _slot(conf: list[str], path: str) -> str:
    """The dev entry that the device has in the container's configuration, or the first that is free."""
    entries = {m[1]: m[2] for row in conf if (m := re.match(r"(dev\d+): (?:path=)?([^,\s]+)", row))}
    taken = next((slot for slot, device in entries.items() if device == path), None)
    return taken or next(f"dev{number}" for number in range(len(entries) + 1) if f"dev{number}" not in entries)


def driver(examined: Examined) -> Iterator[Outcome]:
    seen, node = examined.seen, examined.node
    if not seen.all("smi-code"):
        if examined.has_gpus:
            yield Outcome(
                status="warn", what="no nvidia-smi is there: memory and load of the GPUs cannot be shown",
                evidence=f"PATH={seen.one('path')}, and the usual folders", mend=_libraries(examined),
            )  # fmt: skip
        else:
            yield ok("no nvidia-smi, and no GPU")
        return
    code = seen.number("smi-code")
    if seen.gpus:
        absent = ailments.unknown_gpus(examined.target.gpus or [], [gpu.index for gpu in seen.gpus])
        rows = ", ".join(f"GPU {gpu.index} {gpu.name}" for gpu in seen.gpus)
        if absent is None:
            yield ok(f"driver {seen.module or 'version unknown'}: {rows}")
        else:
            yield Outcome(
                status="fail", what=f"{absent.what}, and `gpus:` of hosts.yaml declares it", evidence=rows,
                mend=f"change `gpus:` of {examined.target.name} in hosts.yaml, or pass it on to the container",
            )  # fmt: skip
        return
    ailment = ailments.nvidia_smi(seen.text("smi"), code or 0, seen.module)
    if code == KILLED and not seen.text("smi"):
        ailment = ailments.nvidia_smi_hangs(SMI_S)
    evidence = f"nvidia-smi, exit code {code}: {' '.join(seen.text('smi').split())[:300] or 'says nothing'}"
    well = node is not None and bool(node.gpus)
    if node is not None and node.all("smi-code"):
        said = f"lists {len(node.gpus)}" if well else " ".join(node.text("smi").split())[:200] or "says nothing"
        evidence += f"; the node's own {said}"
    mend = ailment.hint
    if ailment.kind in ("lost", "none") and (well or node is None or not node.all("smi-code")):
        mend = examined.hands.restart()
    elif ailment.kind in ("mismatch", "libraries") and (well or node is None):
        mend = _libraries(examined)
    elif ailment.kind in ("mismatch", "fallen", "lost"):
        mend = examined.hands.on_node("reboot") + "   # ends every run of the node"
    elif ailment.kind in ("unloaded", "unreachable"):
        mend = examined.hands.on_node("modprobe nvidia && nvidia-modprobe -c 0 -u")
    elif ailment.kind in ("hangs", "fails", "none"):
        mend = examined.hands.on_node("dmesg | grep -i nvrm | tail")
    yield Outcome(status=_severity(examined), what=ailment.what, evidence=evidence, mend=mend)


def _libraries(examined: Examined) -> str:
    """The user-space half of the driver, of exactly the version that the kernel's half has."""
    module = examined.seen.module or (examined.node.module if examined.node else None)
    if module is None:
        return "install the libraries of the node's driver version there, without the kernel module"
    url = f"https://us.download.nvidia.com/XFree86/Linux-x86_64/{module}/NVIDIA-Linux-x86_64-{module}.run"
    kernel = " --no-kernel-modules" if examined.target.vmid is not None else ""
    return examined.hands.inside(f"curl -fsSLO {url} && sh NVIDIA-Linux-x86_64-{module}.run --silent{kernel}")


def torch(examined: Examined) -> Iterator[Outcome]:
    seen, target = examined.seen, examined.target
    path = seen.one("torch-python")
    if not path:
        yield ok("no environment is there yet that could be asked: a launch makes one")
        return
    if path == seen.one("python") and "T version" not in seen.text("python-says"):
        yield Outcome(status="unknown", what="not looked at: python comes first")
        return
    said, code = seen.torch, seen.number("torch-code")
    trial = f"{shlex.quote(path)} -m torch.utils.collect_env"
    if said is None:
        last = (seen.all("torch") or [f"exit code {code}"])[-1]
        late = code == KILLED and not seen.text("torch")
        yield Outcome(
            status=_severity(examined), what=f"{path} could not be asked for torch"
            + (f": importing it takes longer than {TORCH_S} s" if late else ""), evidence=last,
            mend=examined.hands.inside(trial),
        )  # fmt: skip
        return
    if error := said.get("error"):
        if said.get("absent") and not examined.wants_gpus:
            yield ok(f"{path} has no torch: what runs there brings its own")
            return
        absent = bool(said.get("absent"))
        yield Outcome(
            status="warn" if absent else "fail", what=f"{path} {'has no torch' if absent else 'cannot import torch'}",
            evidence=str(error)[:300], mend=examined.hands.inside(f"{shlex.quote(path)} -m pip install torch"),
        )  # fmt: skip
        return
    version = f"torch {said.get('version')}"
    expected = len(target.gpus or []) or len(seen.gpus)
    count = int(said.get("count") or 0)
    if not examined.has_gpus or (count and count >= expected):
        yield ok(f"{version} in {path} sees {count} GPU{'' if count == 1 else 's'}, {said.get('seconds', 0):.1f} s")
        return
    why = str(said.get("why") or said.get("warned") or "").strip()
    if not said.get("cuda"):
        yield Outcome(
            status=_severity(examined), what=f"{version} in {path} is a build without CUDA: it sees no GPU",
            evidence="torch.version.cuda is None",
            mend=examined.hands.inside(f"{shlex.quote(path)} -m pip install --force-reinstall torch"),
        )  # fmt: skip
        return
    trouble = next(_troubles(examined), None)
    listed = f"nvidia-smi lists {len(seen.gpus)}" if seen.gpus else "nvidia-smi lists none"
    because, mend = "", examined.hands.inside(trial)
    if trouble is not None:
        because, mend = f": {trouble[1].what}", _mend(examined, trouble[1].kind, [trouble[0]])
    elif re.search(r"driver.*(too old|insufficient)", why):
        because = ": the driver is older than this torch needs"
        mend = "upgrade the driver of the node, or take a torch that is built for an older CUDA"
    elif "999" in why or "unknown error" in why:
        because = ": CUDA does not start, as after a restart of the node before nvidia-uvm was loaded"
        mend = examined.hands.on_node("nvidia-modprobe -c 0 -u")
        if target.vmid is not None:
            mend = examined.hands.on_node(f"nvidia-modprobe -c 0 -u && pct reboot {target.vmid}")
    sees = f"sees {count} of {expected} GPUs" if count else "sees no GPU"
    yield Outcome(
        status=_severity(examined), what=f"{version} in {path} {sees}, though {listed}{because}",
        evidence=why[:300] or f"torch.cuda.device_count() is {count}", mend=mend,
    )  # fmt: skip


def compiler(examined: Examined) -> Iterator[Outcome]:
    """torch.compile builds a launcher for each kernel, with the machine's own C compiler."""
    seen = examined.seen
    found = next((path for name in ("cc", "gcc", "clang") if (path := seen.program(name))), None)
    header = re.search(r"^T headerless (.*)$", seen.text("python-says"), re.MULTILINE)
    if not examined.has_gpus:
        yield ok(f"{found or 'none'}; without GPUs nothing needs one but what compiles for the CPU")
    elif found is None:
        yield Outcome(
            status="warn", what="there is no C compiler: torch.compile on a GPU ends with `Failed to find C compiler`",
            evidence="neither cc, gcc nor clang is in PATH", mend=examined.hands.install("gcc", "python3-dev"),
        )  # fmt: skip
    elif header:
        yield Outcome(
            status="warn", what="Python's headers are not there: torch.compile on a GPU ends without Python.h",
            evidence=f"no {header[1]}", mend=examined.hands.install("python3-dev"),
        )  # fmt: skip
    else:
        yield ok(f"{found}, and Python's headers")


CHECKS = [
    Check(name="devices", asks="/dev/nvidiactl, /dev/nvidia-uvm and each /dev/nvidiaN open, for the run's own user",
          look=devices, part="gpu", launch=True, personal=True),
    Check(name="driver", asks="nvidia-smi answers, with the library of the kernel module's version, and knows `gpus:`",
          look=driver, part="nvidia-smi", launch=True),
    Check(name="torch", asks="torch, imported by the Python that runs will have, sees as many GPUs", look=torch,
          part="torch", full=True, personal=True),
    Check(name="compiler", asks="a C compiler and Python's headers, which torch.compile needs on a GPU",
          look=compiler, part="python", full=True),
]  # fmt: skip
