"""What may be read back as a record: every scalar is checked, whoever wrote it."""

import json

import pytest

from orchestrator.errors import AgentError
from orchestrator.inventory import Target
from orchestrator.model import (
    ExitRecord,
    Finding,
    FollowedLog,
    Heartbeat,
    LogSummary,
    Misfit,
    OpenFinding,
    Process,
    ProgramExit,
    RunSpec,
    ScanState,
    StopRequest,
    SupervisorRecord,
    Worker,
    from_json,
    to_json,
)
from orchestrator.remote import understood

FOUND = Finding(type="E", message="m", traceback="t", fingerprint="f", offset=3, at=1.5)
RECORDS = [
    ExitRecord(at=1.0, code=3, last_step=2),
    StopRequest(at=1.0, by="me", grace_s=60.0),
    SupervisorRecord(
        attempt=1, nonce="n", pid=2, start_ticks=3, boot="b", started_at=1.0, log_device=1, log_inode=(1 << 64) - 1,
        header_bytes=9, program_exit=ProgramExit(at=2.0, signal=9),
    ),
    FollowedLog(
        summary=LogSummary(
            step=3, step_at=1.0, loss=2.0, workers=[Worker(name="a", step=3)], findings=[FOUND],
            open_findings=[OpenFinding(finding=FOUND)], scan=ScanState(recent_tok_s=[1.0]),
        )
    ),
    RunSpec(run_id="r", nonce="n", argv=["x"], target="t", owner="o", bundle="b", env={"A": "b"}, gpus=[0]),
]  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_as_it_was_written(record):
    assert from_json(type(record), json.loads(json.dumps(to_json(record)))) == record


def test_a_whole_number_is_a_float_and_an_unknown_key_is_ignored():
    read = from_json(StopRequest, {"at": 5, "by": "me", "grace_s": 1, "later": True})
    assert read == StopRequest(at=5.0, by="me", grace_s=1.0)
    assert type(read.at) is float


@pytest.mark.parametrize(
    ("cls", "data", "where"),
    [
        (LogSummary, {"offset": "abc"}, "LogSummary.offset needs int, not str"),
        (StopRequest, {"at": "x", "by": "me", "grace_s": 1}, "StopRequest.at needs float, not str"),
        (StopRequest, {"at": True, "by": "me", "grace_s": 1}, "StopRequest.at needs float, not bool"),
        (StopRequest, {"at": 1, "by": "me", "grace_s": 1, "now": 1}, "StopRequest.now needs bool, not int"),
        (StopRequest, {"at": 1, "by": "me"}, "StopRequest has no grace_s"),
        (ExitRecord, {"at": 1, "code": "three"}, "ExitRecord.code needs int, not str"),
        (ExitRecord, {"at": 1, "code": 1.0}, "ExitRecord.code needs int, not float"),
        (ExitRecord, {"at": float("inf")}, "ExitRecord.at is not finite"),
        (ExitRecord, {"at": 10**400}, "ExitRecord.at is not finite"),
        (ExitRecord, {"at": None}, "ExitRecord.at needs float, not NoneType"),
        (ExitRecord, {"at": 1, "code": 10**400}, "ExitRecord.code is beyond 64 bits"),
        (Heartbeat, {"phase": "x", "at": 1, "step": "12"}, "Heartbeat.step needs int, not str"),
        (Heartbeat, {"phase": "x", "at": 1, "step": 1.5}, "Heartbeat.step needs int, not float"),
        (Heartbeat, {"phase": "x", "at": 1, "step": True}, "Heartbeat.step needs int, not bool"),
        (Heartbeat, {"phase": ["x"], "at": 1, "step": 1}, "Heartbeat.phase needs str, not list"),
        (Heartbeat, {"phase": "x", "at": 1, "step": 1, "gpu_memory_bytes": {"0": "a"}}, "gpu_memory_bytes.0 needs int"),
        (Heartbeat, [1], "Heartbeat needs an object, not list"),
        (LogSummary, {"workers": {}}, "LogSummary.workers needs list, not dict"),
        (LogSummary, {"workers": [{"name": 3}]}, r"LogSummary.workers\[0\].name needs str, not int"),
        (SupervisorRecord, {**to_json(RECORDS[2]), "program_exit": 3}, "program_exit needs an object"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(cls, data, where):
    with pytest.raises(Misfit, match=where):
        from_json(cls, data)


def test_a_strange_answer_is_the_targets_error():
    target = Target(name="gpu1", workdir="/w")
    assert understood(list[Process], [], target) == []
    with pytest.raises(AgentError, match=r"list\[0\] has no pid") as caught:
        understood(list[Process], [{}], target)
    assert caught.value.target == "gpu1"


