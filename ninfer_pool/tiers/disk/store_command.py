"""`ninfer-pool store {ls,verify,prune,rm} DIR`: look at and tidy a disk tier, without its model."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ninfer_pool.core.sizes import format_bytes, parse_size
from ninfer_pool.errors import StoreError, UsageError
from ninfer_pool.tiers.disk.files import Files
from ninfer_pool.tiers.disk.geometry import VersionError
from ninfer_pool.tiers.disk.manifest import HASH, Blob, EntryRecord
from ninfer_pool.tiers.disk.root import Mode, Root
from ninfer_pool.tiers.disk.section import File, Section

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
SHOWN = 12
"""Hexadecimal digits of a name in a table; as few as 6 name an entry."""
_NAME = re.compile(r"[0-9a-f]{6,32}")
Row: TypeAlias = tuple[Section, str, EntryRecord]
_HEAD = ("id", "key", "tokens", "checkpoints", "bytes", "salted", "fingerprint", "age")


def add_store(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs and their options."""
    verbs = parser.add_subparsers(required=True, metavar="ls|verify|prune|rm")
    listed = _add(verbs, "ls", "list the entries", run=_ls)
    listed.add_argument("--json", action="store_true", help="everything, as JSON")
    verified = _add(verbs, "verify", "read every byte; exit code 1 if any is damaged", run=_verify)
    verified.add_argument("--json", action="store_true", help="what was found, as JSON")
    pruned = _add(verbs, "prune", "remove what no entry needs, and entries as told", run=_prune)
    pruned.add_argument(
        "--budget", type=_size, metavar="SIZE", help="least recently used first, until DIR fits it"
    )
    pruned.add_argument(
        "--older-than", type=_duration, metavar="TIME", help="made that long ago: 90s, 30m, 12h, 7d"
    )
    pruned.add_argument(
        "--foreign", type=_fingerprint, metavar="FINGERPRINT", help="all that has this one, see ls"
    )
    removed = _add(verbs, "rm", "remove entries", run=_rm)
    removed.add_argument("names", nargs="+", metavar="ID|KEY", help="6 digits or more, see ls")


def _add(verbs: Any, name: str, text: str, *, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text)
    parser.add_argument("dir", type=Path, metavar="DIR")
    parser.set_defaults(run=run)
    return parser


def parse_duration(text: str) -> int:
    """Return the seconds of ``90s``, ``30m``, ``12h``, ``7d`` or ``2w``.

    Raises:
        UsageError: quotes the text and says what would be right.
    """
    match = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    if match is None:
        raise UsageError(f"{text!r} is not a time; write one such as 90s, 30m, 12h, 7d or 2w")
    return int(match[1]) * SECONDS[match[2]]


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _duration(text: str) -> int:
    try:
        return parse_duration(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _fingerprint(text: str) -> str:
    if HASH.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: write its 32 digits, as ls --json does")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A store's folder, open, with every fingerprint in it that can be read, and why not."""

    root: Root
    sections: dict[str, Section]
    unreadable: dict[str, StoreError]

    @classmethod
    @contextmanager
    def open(cls, path: Path, *, mode: Mode, tokens: str = "leave") -> Iterator[Store]:
        """Open a store and read its manifests; see `Section.read_records`.

        Raises:
            StoreError: no store, of another version, or in use.
        """
        root = Root(path, Files(), mode=mode)
        store = cls(root=root, sections={}, unreadable={})
        try:
            for fingerprint in root.fingerprints():
                try:
                    section = Section.open(root, fingerprint)
                except StoreError as error:
                    store.unreadable[fingerprint] = error
                    continue
                store.sections[fingerprint] = section
                section.read_records(tokens=tokens)
            yield store
        finally:
            for section in store.sections.values():
                section.close()
            root.close()

    def entries(self) -> Iterator[Row]:
        """Yield every entry, the last used of each fingerprint first."""
        for section in self.sections.values():
            for *_, name in reversed(section.by_age()):
                yield section, name, section.records[name]

    def oldest(self) -> list[tuple[Section, str]]:
        """Return every entry, least recently used first."""
        rows = sorted(row for section in self.sections.values() for row in section.by_age())
        return [(self.sections[fingerprint], name) for *_, fingerprint, name in rows]


def _ls(args: argparse.Namespace) -> None:
    with Store.open(args.dir, mode="read") as store:
        found = _listed(store, now=time.time())
    if args.json:
        print(json.dumps(found, indent=2, allow_nan=False))
        return
    for line in _table([_row(entry) for entry in found["entries"]]):
        print(line)
    count = len(found["entries"])
    print(f"{count} {_plural(count, 'entry', 'entries')}, {format_bytes(found['bytes'])} in all")
    for damaged in found["damaged"]:
        print(f"damaged: {damaged['file']}: {damaged['why']}")
    for other in found["unreadable"]:
        print(f"left out: {other['fingerprint']}: {other['why']}")


def _listed(store: Store, *, now: float) -> dict[str, Any]:
    return {
        "version": 1,
        "bytes": store.root.tree_bytes(),
        "entries": [_entry(*row, now=now) for row in store.entries()],
        "fingerprints": [_about(section) for section in store.sections.values()],
        "damaged": _damaged_manifests(store),
        "unreadable": [
            {"fingerprint": name, "why": str(why)} for name, why in store.unreadable.items()
        ],
    }


def _entry(section: Section, name: str, record: EntryRecord, *, now: float) -> dict[str, Any]:
    """What may be told of an entry: neither its tokens nor its salt."""
    return {
        "id": name,
        "key": record.key,
        "fingerprint": section.fingerprint,
        "tokens": record.tokens,
        "checkpoints": [{"position": mark.position, "kind": mark.kind} for mark in record.marks],
        "bytes": section.sizes["entries", f"{name}.json"] + sum(record.files().values()),
        "salted": record.namespace.salt is not None,
        "adapter": record.namespace.adapter,
        "hits": record.hits,
        "priority": record.priority,
        "used": record.used,
        "created": record.created,
        "age_seconds": max(0.0, now - record.created),
    }


def _about(section: Section) -> dict[str, Any]:
    space, sizes = section.namespace, section.geometry
    return {
        "fingerprint": section.fingerprint,
        "weights": space.weights,
        "kv_dtype": space.kv_dtype,
        "rope": space.rope,
        "draft": space.draft,
        "layout": sizes.layout,
        "page_bytes": sizes.page_bytes,
        "image_bytes": sizes.image_bytes,
        "entries": len(section.records),
        "bytes": sum(section.sizes.values()),
    }


def _damaged_manifests(store: Store) -> list[dict[str, Any]]:
    return [
        {
            "file": f"{fingerprint}/entries/{name}",
            "why": why,
            "entries": [name.removesuffix(".json")],
        }
        for fingerprint, section in store.sections.items()
        for name, why in sorted(section.damaged.items())
    ]


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    return (
        entry["id"][:SHOWN],
        entry["key"][:SHOWN],
        f"{entry['tokens']:,}",
        str(len(entry["checkpoints"])),
        format_bytes(entry["bytes"]),
        "yes" if entry["salted"] else "no",
        entry["fingerprint"][:SHOWN],
        _age(entry["age_seconds"]),
    )


def _age(seconds: float) -> str:
    for unit in "wdhm":
        if seconds >= 2 * SECONDS[unit]:
            return f"{seconds / SECONDS[unit]:.0f}{unit}"
    return f"{seconds:.0f}s"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in (_HEAD, *rows)]


def _plural(count: int, one: str, many: str) -> str:
    return one if count == 1 else many


def _verify(args: argparse.Namespace) -> int:
    with Store.open(args.dir, mode="read", tokens="check") as store:
        damaged = _damaged_manifests(store)
        damaged += [
            {"file": f"{name}/geometry.json", "why": str(why), "entries": []}
            for name, why in store.unreadable.items()
            if not isinstance(why, VersionError)
        ]
        files = 0
        for section in store.sections.values():
            payload = _payload(section)
            files += len(payload)
            damaged += _verify_files(section, payload)
        entries = sum(len(section.records) for section in store.sections.values())
    if args.json:
        found = {"version": 1, "entries": entries, "files": files, "damaged": damaged}
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        for each in damaged:
            print(f"damaged: {each['file']}: {each['why']}")
        print(f"{entries} entries in {files} files read; {len(damaged) or 'none'} damaged")
    return 1 if damaged else 0


def _payload(section: Section) -> dict[File, tuple[Blob, list[str]]]:
    """The payload files of a fingerprint, each with the entries that need it."""
    found: dict[File, tuple[Blob, list[str]]] = {}
    for name, record in section.records.items():
        blobs: dict[File, Blob] = {("runs", run.file): run for run in record.runs}
        for mark in record.marks:
            if mark.image is not None:
                blobs["images", mark.image.file] = mark.image
        for file, blob in blobs.items():
            found.setdefault(file, (blob, []))[1].append(name)
    return found


def _verify_files(
    section: Section, payload: dict[File, tuple[Blob, list[str]]]
) -> Iterator[dict[str, Any]]:
    for (folder, name), (blob, entries) in sorted(payload.items()):
        try:
            section.verify(folder, blob)
        except StoreError as error:
            why = str(error).removeprefix(f"{section.anchor / folder / name}: ")
            where = f"{section.fingerprint}/{folder}/{name}"
            yield {"file": where, "why": why, "entries": entries}


def _prune(args: argparse.Namespace) -> None:
    with Store.open(args.dir, mode="change") as store:
        before = store.root.tree_bytes()
        entries = sum(len(section.records) for section in store.sections.values())
        files = sum(section.sweep()[0] for section in store.sections.values())
        if args.foreign is not None:
            _drop_fingerprint(store, args.foreign)
        if args.older_than is not None:
            _drop_older(store, time.time() - args.older_than)
        if args.budget is not None:
            _drop_to(store, args.budget)
        entries -= sum(len(section.records) for section in store.sections.values())
        freed = before - store.root.tree_bytes()
    words = f"removed {entries} {_plural(entries, 'entry', 'entries')}"
    print(f"{words} and {files} files that no entry needed; freed {format_bytes(freed)}")


def _drop_fingerprint(store: Store, fingerprint: str) -> None:
    section = store.sections.get(fingerprint)
    if section is None:
        known = ", ".join(store.sections) or "none"
        raise UsageError(f"--foreign: {fingerprint} is not in DIR; it has {known}")
    section.remove()


def _drop_older(store: Store, moment: float) -> None:
    for section, name in store.oldest():
        if section.records[name].created < moment:
            section.drop(name)


def _drop_to(store: Store, budget: int) -> None:
    total = store.root.tree_bytes()
    for section, name in store.oldest():
        if total <= budget:
            break
        total -= section.drop(name)


def _rm(args: argparse.Namespace) -> None:
    with Store.open(args.dir, mode="change") as store:
        rows = list(store.entries())
        chosen: dict[tuple[str, str], Section] = {}
        for word in args.names:
            for section, name in _named(rows, word):
                chosen[section.fingerprint, name] = section
        freed = sum(section.drop(name) for (_, name), section in chosen.items())
    count = len(chosen)
    print(f"removed {count} {_plural(count, 'entry', 'entries')}; freed {format_bytes(freed)}")


def _named(
    rows: Sequence[tuple[Section, str, EntryRecord]], word: str
) -> list[tuple[Section, str]]:
    """The entries that an id, a key, or the beginning of one names.

    A key may have several entries, and all of them are meant; a beginning must tell one name.
    """
    if _NAME.fullmatch(word) is None:
        raise UsageError(f"{word!r}: write 6 to 32 hexadecimal digits of an id or key, as ls does")
    names = {name for _, entry, record in rows for name in (entry, record.key)}
    meant = sorted(name for name in names if name.startswith(word))
    if not meant:
        raise UsageError(f"{word}: no entry has this id or key; see ls")
    if len(meant) > 1:
        raise UsageError(f"{word}: {len(meant)} ids and keys begin so; write more digits")
    return [(section, name) for section, name, record in rows if meant[0] in (name, record.key)]
