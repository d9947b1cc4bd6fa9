"""What a process takes of memory, as the kernel says."""

import contextlib
import re

MB = 1 << 20


def _field(pid, name):
    with open(f"/proc/{pid}/status") as status:
        return int(re.search(rf"^{name}:\s+(\d+) kB", status.read(), re.M).group(1)) << 10


def rss(kvasir):
    """Bytes that it takes now."""
    return _field(kvasir.process.pid, "VmRSS")


def peak(kvasir):
    """Bytes that it took at most since the start, or since `peak_from_now`."""
    return _field(kvasir.process.pid, "VmHWM")


@contextlib.contextmanager
def grows_at_most(kvasir, megabytes):
    """What happens within makes it grow by no more than this, even for a moment."""
    with open(f"/proc/{kvasir.process.pid}/clear_refs", "w") as refs:
        refs.write("5")
    before = rss(kvasir)
    yield
    grown = (peak(kvasir) - before) / MB
    assert grown <= megabytes, f"it grew by {grown:.0f} MB from {before / MB:.0f} MB, more than {megabytes} MB"
