"""Which GPUs a run is to have to itself: --gpus, hosts.yaml and the configuration, and what nvidia-smi -L lists."""

from __future__ import annotations

import pytest

from orchestrator import gpus
from orchestrator.agent import devices, locks
from orchestrator.agent.main import Refusal
from orchestrator.errors import ConfigError
from orchestrator.gpus import Asked, choose, parse
from orchestrator.inventory import Target
from orchestrator.model import Device, GpuWish, Obstacle, told

WHOLE = """\
GPU 0: NVIDIA H200 (UUID: GPU-b4895dbf-9350-2524-a89b-98161ddd9fe4)
GPU 1: NVIDIA H200 (UUID: GPU-b4195db0-1a01-c3f1-ae12-23473e67f54b)
GPU 2: NVIDIA H200 (UUID: GPU-58bd1b1a-1234-4f6e-8e53-aa2ac2c1f7de)
"""
DIVIDED = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-9c73eb7b-8d6d-6c0e-dc13-97873e2ede40)
  MIG 3g.40gb     Device  0: (UUID: MIG-a686709d-6dc2-542a-8851-0d2508448c10)
  MIG 1g.10gb     Device  1: (UUID: MIG-53864714-0a66-5df2-9007-9268e30d9a72)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-c92e2d5d-4a69-f1cd-4df0-305f8606705a)
"""
OLD_DRIVER = """\
GPU 0: A100-PCIE-40GB (UUID: GPU-9de3d0e8-33f5-10dc-0c79-2c88a7ab0a23)
  MIG 4g.20gb Device 0: (UUID: MIG-GPU-9de3d0e8-33f5-10dc-0c79-2c88a7ab0a23/2/0)
"""
"""All three as the driver's program prints them, of R5xx and, the last, R450."""
SIX = [0, 1, 2, 3, 4, 5]


def numbers(found: list[Device]) -> list[str]:
    return [one.number for one in found]


def test_what_nvidia_smi_lists_is_known_by_number_and_uuid() -> None:
    first, _, last = devices.parsed(WHOLE)
    assert (first.number, first.name, last.uuid) == ("0", "NVIDIA H200", "GPU-58bd1b1a-1234-4f6e-8e53-aa2ac2c1f7de")
    assert devices.parsed("No devices were found\n") == [] == devices.parsed("0, NVIDIA H200, 37, 1024, 143771\n")


def test_of_a_divided_gpu_the_parts_are_claimed_and_not_the_whole() -> None:
    known = devices.parsed(DIVIDED)
    assert numbers(known) == ["0:0", "0:1", "1"]
    assert [one.uuid[:12] for one in known] == ["MIG-a686709d", "MIG-53864714", "GPU-c92e2d5d"]
    assert numbers(devices.named("0", known)) == ["0:0", "0:1"] and numbers(devices.named("0:1", known)) == ["0:1"]
    [part] = devices.parsed(OLD_DRIVER)
    assert (part.number, part.uuid) == ("0:0", "MIG-GPU-9de3d0e8-33f5-10dc-0c79-2c88a7ab0a23/2/0")


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["0", "1", "2"]), ("", []), ("-1", []), ("2,0", ["2", "0"]), ("1,7,0", ["1"]), ("GPU-58bd", ["2"]),
        ("GPU-b4", []), (" 1 , 1 ", ["1"]),
    ],
)  # fmt: skip
def test_without_a_word_a_run_claims_what_it_would_see(visible: str | None, seen: list[str]) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert numbers(devices.pool(GpuWish(), environ, devices.parsed(WHOLE))) == seen


def test_what_is_named_and_not_there_is_refused() -> None:
    known = devices.parsed(WHOLE)
    for wish in (GpuWish(among=["3"]), GpuWish(among=["GPU-b4"]), GpuWish(count=4), GpuWish(among=["0"], count=2)):
        with pytest.raises(Refusal) as caught:
            devices.pool(wish, {}, known)
        assert "0" in caught.value.message
    assert numbers(devices.pool(GpuWish(among=["1", "GPU-58"]), {"CUDA_VISIBLE_DEVICES": "0"}, known)) == ["1", "2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("all", ([], None)), ("2", ([], 2)), ("0,1", (["0", "1"], None)), ("3,", (["3"], None)), ("0:1", (["0:1"], None)),
     ("GPU-3f2a,MIG-9", (["GPU-3f2a", "MIG-9"], None)), ("10", ([], 10))],
)  # fmt: skip
def test_gpus_is_all_how_many_or_which(text: str, expected: tuple[list[str], int | None]) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["", "0", "00", "-1", "0,0", "gpu0", "1;2", "two", "0,,x", "GPU", "1 2"])
def test_gpus_that_mean_nothing_are_refused_with_what_may_be_said(text: str) -> None:
    with pytest.raises(ConfigError, match="none, all, how many"):
        parse(text)


def wish(text: str | None = None, *, cuda: int | None = None, **target: object) -> GpuWish | None:
    return choose(Asked(gpus=text), Target(name="t", **target), cuda=cuda).wish  # type: ignore[arg-type]


def test_a_configuration_that_counts_on_so_many_claims_so_many_and_one_for_the_cpu_none() -> None:
    some = wish(cuda=2, gpus=SIX)
    assert some is not None and (some.among, some.count) == (["0", "1", "2", "3", "4", "5"], 2) and some.wanted
    some = wish(cuda=1)
    assert some is not None and (some.among, some.count, some.wanted, some.must) == ([], 1, False, False)
    assert wish(cuda=0, gpus=SIX) is None
    assert wish() == GpuWish(place="t, this machine"), "a program of which nothing is known: all that it would see"


def test_hosts_yaml_may_say_what_runs_see_by_the_variable_itself() -> None:
    seen = wish(gpus=SIX, env={"CUDA_VISIBLE_DEVICES": "4,5"})
    assert seen is not None and seen.among == ["4", "5"]
    assert wish(env={"CUDA_VISIBLE_DEVICES": ""}) is None
    seen = wish("0,", env={"CUDA_VISIBLE_DEVICES": "4,5"})
    assert seen is not None and seen.among == ["0"], "what is typed counts more"


def test_what_is_asked_for_lies_within_what_hosts_yaml_allows() -> None:
    some = wish("2", gpus=[4, 5, 6])
    assert some is not None and (some.among, some.count, some.must) == (["4", "5", "6"], 2, True)
    with pytest.raises(ConfigError, match="only GPU 4, 5, 6, not 0"):
        wish("0,", gpus=[4, 5, 6])
    with pytest.raises(ConfigError, match="name 2 CUDA devices"):
        wish("0,", cuda=2)
    with pytest.raises(ConfigError, match="name 1 CUDA device"):
        wish("none", cuda=1)


def test_a_run_that_is_to_have_none_sees_none() -> None:
    chosen = choose(Asked(gpus="none"), Target(name="t", gpus=[0]), cuda=None)
    assert (chosen.wish, chosen.numbers, chosen.env) == (None, [], {gpus.VISIBLE: ""})


def test_no_claim_leaves_everything_as_hosts_yaml_has_it() -> None:
    chosen = choose(Asked(claim=False), Target(name="t", gpus=[0, 1]), cuda=None)
    assert (chosen.wish, chosen.numbers, chosen.env) == (None, [0, 1], {})
    named = choose(Asked(claim=False, gpus="GPU-3f"), Target(name="t"), cuda=None)
    assert (named.wish, named.env) == (None, {gpus.VISIBLE: "GPU-3f"})
    with pytest.raises(ConfigError, match="asks nobody what is free"):
        choose(Asked(claim=False, gpus="2"), Target(name="t"), cuda=None)


@pytest.mark.parametrize("asked", [Asked(gpus="none", queue=True), Asked(queue=True, claim=False)])
def test_waiting_for_nothing_is_refused(asked: Asked) -> None:
    with pytest.raises(ConfigError, match="--queue waits for"):
        choose(asked, Target(name="t"), cuda=None)
    with pytest.raises(ConfigError, match="runs on the CPU"):
        choose(Asked(queue=True), Target(name="t"), cuda=0)


def test_one_holder_of_several_gpus_is_named_once() -> None:
    both = [Obstacle(gpu=number, what="held by run a", since=40.0) for number in ("0", "1")]
    other = Obstacle(gpu="2", what="used by something not visible from here")
    assert told([*both, other], 100.0) == (
        "GPU 0, 1 held by run a for 60 s; GPU 2 used by something not visible from here"
    )


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "virtiofs", "ceph"])
def test_a_folder_that_machines_may_share_holds_no_claims(kind: str) -> None:
    assert locks.is_remote(kind)
    assert not any(map(locks.is_remote, ("ext4", "xfs", "zfs", "btrfs", "tmpfs", "overlay", "")))
