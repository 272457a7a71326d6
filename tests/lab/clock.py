# Makes a Python's wall clock wrong by what /etc/lab-clock says, and with it the times of files.
# Each line there is a moment and the nanoseconds by which wall clock and time since boot are off from then on: a file
# has the time that the clock showed when it was written. `Lab.clock` appends this to the one module that every Python
# of a container imports, `-I -S` or not: namespaces shift no wall clock, and libfaketime breaks `time.sleep` where it
# is told to leave the monotonic clock alone.


def _lab_clock():
    import os
    import time

    now_ns, stat, fstat, lstat, utime = time.time_ns, os.stat, os.fstat, os.lstat, os.utime
    clock_gettime, boottime = time.clock_gettime, time.CLOCK_BOOTTIME
    times = ("st_atime", "st_mtime", "st_ctime")
    START = (-(1 << 64), 0, 0)  # files of a container may be from before 1970

    def settings():
        try:
            fd = os.open("/etc/lab-clock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return [START]
        try:
            lines = os.read(fd, 4096).decode().splitlines()
        finally:
            os.close(fd)
        return [START, *(tuple(int(word) for word in line.split()) for line in lines)]

    def off_ns(known, at):
        return [wall for since, wall, _ in known if since <= at][-1]

    def shown(found):
        known = settings()
        fields = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        for name in times:
            off = off_ns(known, fields[f"{name}_ns"])
            fields[f"{name}_ns"] += off
            fields[name] += off / 1e9
        return os.stat_result([*found[:7], *(int(fields[name]) for name in times)], fields)

    def set_times(path, times=None, *, ns=None, **more):
        if times is not None:
            ns = [int(at * 1e9) for at in times]
        if ns is not None:
            wall = settings()[-1][1]
            more["ns"] = tuple(at - wall for at in ns)
        utime(path, **more)

    time.time_ns = lambda: now_ns() + settings()[-1][1]
    time.time = lambda: time.time_ns() / 1e9
    time.clock_gettime = lambda which: clock_gettime(which) + (settings()[-1][2] / 1e9 if which == boottime else 0)
    os.stat = lambda *words, **more: shown(stat(*words, **more))
    os.fstat = lambda fd: shown(fstat(fd))
    os.lstat = lambda *words, **more: shown(lstat(*words, **more))
    os.utime = set_times


_lab_clock()
