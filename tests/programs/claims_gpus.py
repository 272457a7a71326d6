"""Waits in line for GPUs, and holds them until its stdin ends: claims_gpus.py ROOT DIR NAME COUNT UUIDS DONE."""

import sys
import time

sys.path.insert(0, sys.argv[1])
from orchestrator.agent import claimed, claims
from orchestrator.model import Claimant, Device

_, _, folder, name, count, uuids, done = sys.argv
pool = [Device(number=str(number), uuid=uuid) for number, uuid in enumerate(uuids.split(","))]
who = Claimant(run_id=name, place="box, container 200 on pve1", host="gpu1", owner="a@laptop", boot=claimed.boot_id(),
               since=time.time())  # fmt: skip
mine = claims.Claims(folder, pool, int(count), who)
while mine.take({}, wait=True):
    print("in line", mine.number, flush=True)
    time.sleep(0.2)
with open(done, "a") as file:
    file.write(name + "\n")
print("has", *sorted(mine.held), flush=True)
sys.stdin.read()
