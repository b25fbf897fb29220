"""How a writer finds the folder of its fingerprint, or makes it."""

from __future__ import annotations

from ninfer_pool.core.identity import Namespace
from ninfer_pool.tiers.disk.files import telling
from ninfer_pool.tiers.disk.geometry import DiskGeometry, encode_geometry
from ninfer_pool.tiers.disk.section import FOLDERS, GEOMETRY, Section


def open_for_writing(section: Section, geometry: DiskGeometry, namespace: Namespace) -> None:
    """Open a section of what is stored so, owner-only, and read every record that is whole.

    Raises:
        StoreError: not writable, or the system is out of something.
    """
    section.set_geometry(geometry, namespace)
    _make_folders(section)
    section.open_folders()
    for name, folder in section.folders.items():
        with telling(section.anchor / name):
            section.root.files.tighten(folder)
    _write_geometry(section)
    section.scan()
    section.read_records(tokens="check")


def _make_folders(section: Section) -> None:
    root = section.root
    with telling(section.anchor):
        root.files.make_subfolder(root.folder, section.fingerprint)
        own = root.files.open_subfolder(root.folder, section.fingerprint)
        try:
            for name in FOLDERS:
                root.files.make_subfolder(own, name)
            root.files.sync(own)
        finally:
            root.files.close(own)
        root.files.sync(root.folder)


def _write_geometry(section: Section) -> None:
    root, own = section.root, section.folders[""]
    where = section.anchor / GEOMETRY
    raw = encode_geometry(section.geometry, section.namespace)
    with telling(section.anchor):
        names = root.files.listing(own)
    root.clean(own, names)
    if names.get(GEOMETRY) == len(raw) and root.read(own, where, len(raw)) == raw:
        return
    root.replace(own, where, raw)
