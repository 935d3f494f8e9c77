"""Look at a running sync from outside: who waits for whom, and which engine tensors differ.

All that is read are the records of `hybridengine.run.activity`, of this user's processes on
this machine.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil
from rich.table import Table

from hybridengine.run.activity import VERIFY, Comparison, Record, private_folder, remove_stale
from hybridengine.run.errors import ConfigError

_LOOK_S = 0.2  # between two looks for a result
_READS, _READ_PAUSE_S = 5, 0.02  # of a file that its process may be writing just now


def read_records() -> list[Record]:
    """Return the records of this user's running processes; remove files of those that ended."""
    if (folder := private_folder()) is None:
        return []
    remove_stale(folder)
    paths = [p for p in sorted(folder.iterdir()) if p.suffix[1:].isdigit()]
    return [r for r in map(_read, paths) if r is not None and _is_running(r)]


def _read(path: Path) -> Record | None:
    for _ in range(_READS):
        with suppress(OSError, msgspec.DecodeError):
            record = msgspec.json.decode(path.read_bytes(), type=Record)
            return record if path.stem == str(record.pid) else None
        time.sleep(_READ_PAUSE_S)
    return None


def _is_running(record: Record) -> bool:
    """Return whether the process of a record runs; its number may be another one's now."""
    try:
        process = psutil.Process(record.pid)
        is_same = process.create_time() <= record.started + 1
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def find_records(target: str) -> list[Record]:
    """Return the records of a job.

    target: the number of one of its processes or of their launcher, or the URL of a server on this
      machine. The trainers and engines of one sync belong together.
    """
    pid = int(target) if target.isdigit() else _server_of(target)
    try:
        family = {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.Error as error:
        raise ConfigError(f"--attach {target}: process {pid} cannot be read: {error}") from None
    records = read_records()
    chosen = [record for record in records if record.pid in family]
    if not chosen:
        raise ConfigError(
            f"--attach {target}: neither process {pid} nor one that it started takes part in a "
            "weight sync of this package. Give a process of this user on this machine: a rank of "
            "the trainer, its launcher, or a worker of the engine"
        )
    worlds, pids, size = set[str](), {record.pid for record in chosen}, -1
    while len(pids) != size:  # a process has records of several worlds
        size = len(pids)
        worlds |= {world for r in records if r.pid in pids for world in r.worlds}
        pids |= {r.pid for r in records if worlds.intersection(r.worlds)}
    return [record for record in records if record.pid in pids]


def _server_of(url: str) -> int:
    """Return the process that listens at a URL of this machine."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    host, port = parts.hostname or "", parts.port
    if port is None or not _is_loopback(host):
        raise ConfigError(
            f"--attach {url!r}: expected the number of a process, or the URL of a server on this "
            "machine with its port, such as http://127.0.0.1:8000"
        )
    for process in psutil.process_iter():
        try:
            listening = [c for c in process.net_connections("tcp") if c.status == "LISTEN"]
        except psutil.Error:  # of another user, or it has just ended
            continue
        if any(c.laddr.port == port for c in listening):
            return int(process.pid)
    raise ConfigError(f"--attach {url}: no process of this user listens on port {port}")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _current(records: Sequence[Record]) -> list[Record]:
    """Return one record per process: one that waits, else the one that changed last."""
    best: dict[int, Record] = {}
    for r in records:
        known = best.setdefault(r.pid, r)
        if (_is_waiting(r), r.since) > (_is_waiting(known), known.since):
            best[r.pid] = r
    return sorted(best.values(), key=_order)


def _order(record: Record) -> tuple[int, int]:
    """Trainers come first, then engines by their number."""
    _, _, engine = record.name.partition(" of engine ")
    return int(engine) + 1 if engine.isdigit() else 0, record.rank


def _is_waiting(record: Record) -> bool:
    return bool(record.collective or record.waits_for)


def _awaited(record: Record, records: Sequence[Record]) -> list[str]:
    """Return the names of the ranks that have not reached the point where a rank waits."""
    if not record.collective:
        return list(record.waits_for)
    here = {r.name for r in records if _is_with(record, r)}
    if record.waits_for:
        return [name for name in record.waits_for if name not in here]
    world = [r for r in records if record.world in r.worlds[:1]]
    missing = [r.name for r in world if r.name not in here]
    unseen = sorted(set(range(record.world_size)) - {r.rank for r in world})
    missing += [f"rank {rank}, of which there is no record here" for rank in unseen]
    if missing:
        return missing
    # All have come: one of them waits for something else inside.
    others = [r for r in records if _is_with(record, r) and r.waits_for]
    return list(dict.fromkeys(name for r in others for name in r.waits_for))


def _is_with(record: Record, other: Record) -> bool:
    same = (other.collective, other.world) == (record.collective, record.world)
    return same and bool(record.collective)


def waits(records: Sequence[Record]) -> Iterator[str]:
    """Yield a sentence for each rank that others wait for, and that waits for nobody itself."""
    current = _current(records)
    waiting = {r.name: _awaited(r, records) for r in current if _is_waiting(r)}
    for name in sorted({name for names in waiting.values() for name in names}):
        by = [waiter for waiter, names in waiting.items() if name in names]
        behind = [r for r in current if r.name == name or r.name.endswith(f" of {name}")]
        places = [f"it is {r.place}" for r in behind if r.name not in waiting]
        if not places and behind:  # it waits for another one, which has a sentence of its own
            continue
        where = "; ".join(places) or "no process of this machine has that name: it may have ended"
        yield f"{name} is what {', '.join(by)} wait{'s' if len(by) == 1 else ''} for; {where}"


def waits_table(records: Sequence[Record]) -> Table:
    """Return a table of what every process does, since when, and for whom it waits."""
    table = Table("rank", "pid", "state", "for", "phase", "waits for", box=None, pad_edge=False)
    now = time.time()
    for r in _current(records):
        awaited = ", ".join(_awaited(r, records)) if _is_waiting(r) else ""
        waits_for = awaited or ("the network, or the device" if _is_waiting(r) else "")
        seconds = f"{now - r.since:.0f} s"
        table.add_row(r.name, str(r.pid), _state(r.pid), seconds, r.place, waits_for)
    return table


def _state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "ended"


def compare(target: str, timeout_s: float) -> list[Record]:
    """Have the next sync compare all engine tensors with the trainers'; return the records then.

    Raises ConfigError where no sync takes place within `timeout_s`.
    """
    records, asked = find_records(target), time.time()
    trainers = {r.pid for r in records if r.name.startswith("trainer rank")}
    if (folder := private_folder()) is not None:
        for pid in trainers:
            (folder / f"{pid}.{VERIFY}").touch(0o600)
    before = {(r.pid, r.started): r.compared for r in records}
    while time.time() < asked + timeout_s:
        records = find_records(target)
        new = [r for r in records if r.compared != before.get((r.pid, r.started))]
        if new and not any(_is_waiting(r) for r in new):
            return records
        time.sleep(_LOOK_S)
    raise ConfigError(
        f"--attach {target}: no sync has compared its tensors within {timeout_s:g} s; without "
        "--verify, see which rank it waits for"
    )


def comparison_text(records: Sequence[Record]) -> Iterator[str]:
    """Yield the results of the last comparison of each process that has made one."""
    for r in records:
        if (found := r.compared) is not None:
            yield f"{r.name}: {_result(found)}"


def _result(found: Comparison) -> str:
    if not found.count:
        return f"after the sync to version {found.version} every engine tensor was the trainer's"
    names = "; ".join(f"{tensor} is not {source}" for tensor, source in found.different)
    return f"after the sync to version {found.version} {found.count} slices differed: {names}"
