"""A disk that is full just when a supervisor begins: a small one of its own, in a mount namespace that ends with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.driver import Specctl

SUPERVISE = """
import os, shutil, sys
from orchestrator.agent import files, supervise
from orchestrator.model import RunPaths
record, root = sys.argv[1:]
os.makedirs(root)
shutil.copy(record, root)
paths = RunPaths(root=root, run_id=os.path.basename(root))
files.write_whole(paths.env, b"PATH=/usr/bin:/bin")
files.reserve(paths.exit)
fd = os.open(os.path.join(root, "ballast"), os.O_WRONLY | os.O_CREAT)
try:
    while True: os.write(fd, bytes(4096))
except OSError:
    pass
code = supervise.main(root)
print(code, open(paths.exit).read())
"""


def test_a_supervisor_that_finds_the_disk_full_says_so_in_the_runs_record(
    lab_ready: None, specctl: Specctl, tmp_path: Path
) -> None:
    run_id = specctl.launch("--until", "process", "--", "true").json["run_id"]
    record, place = specctl.run_dir(run_id) / "run.json", tmp_path / "disk"
    place.mkdir()
    script = 'mount -t tmpfs -o size=256k disk "$1"; exec "$2" -c "$3" "$4" "$1/runs/$5"'
    words = ["unshare", "--mount", "sh", "-ec", script, "sh", place, sys.executable, SUPERVISE, record, run_id]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    code, _, ending = done.stdout.partition(" ")
    assert code == "1", done.stderr
    assert "No space left" in json.loads(ending)["never_started"] and str(place) in json.loads(ending)["never_started"]
