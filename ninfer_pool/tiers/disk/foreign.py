"""Room made at the expense of entries that are not this folder's own."""

from __future__ import annotations

from contextlib import ExitStack, suppress

from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk.root import Root
from ninfer_pool.tiers.disk.section import Section


def drop_foreign(root: Root, own: str, bytes_needed: int) -> int:
    """Remove entries of fingerprints other than ``own``, oldest first, until enough is freed.

    Folders that this version cannot read are left alone. Returns the bytes freed, maybe fewer.

    Raises:
        StoreError: what is there cannot be listed.
    """
    freed = 0
    with ExitStack() as stack:
        sections: dict[str, Section] = {}
        for fingerprint in root.fingerprints():
            if fingerprint == own:
                continue
            try:
                section = Section.open(root, fingerprint)
            except StoreError:
                continue
            stack.callback(section.close)
            section.read_records(tokens="leave")
            sections[fingerprint] = section
        for row in sorted(row for section in sections.values() for row in section.by_age()):
            if freed >= bytes_needed:
                break
            _, _, fingerprint, name = row
            section = sections[fingerprint]
            with suppress(StoreError):  # it cannot be removed; others may be
                freed += section.drop(name)
                if not section.records:
                    freed += section.remove()
    return freed
