"""A model's tensors in its folder's ``*.safetensors``, under their published names."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ninfer_pool.errors import ModelError
from ninfer_pool.runner.config import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TEXT_PREFIXES = ("model.language_model.", "model.")
VISION = "model.visual."
DTYPES = ("F32", "BF16", "F16")
LISTED = 20
"""Names that one error lists at most."""

Shape = tuple[int, ...]


class Weights:
    """The tensors of one folder, each read by `get`.

    Names are those of a text model: the longer prefix of multimodal folders is removed, and
    their vision tower is left out.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._open = {path: safe_open(path, framework="pt") for path in set(files.values())}
        self._published = {
            _text_name(name, files): name for name in files if not name.startswith(VISION)
        }

    @classmethod
    def open(cls, folder: str | Path) -> Weights:
        """Find the tensors of ``folder``: one file, or shards with an index.

        Raises:
            ModelError: no such files, or files that are no safetensors.
        """
        folder = Path(folder)
        try:
            return cls(_locate(folder))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"model: {str(folder)!r}: {error}; needs safetensors") from None

    @property
    def names(self) -> frozenset[str]:
        """The names of the text model's tensors."""
        return frozenset(self._published)

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor in its file's dtype."""
        return self._read(self._published[name])

    def _read(self, published: str) -> torch.Tensor:
        file: Any = self._open[self._files[published]]  # its methods carry no types
        tensor: torch.Tensor = file.get_tensor(published)
        return tensor

    def _header(self, name: str) -> tuple[Shape, str]:
        published = self._published[name]
        file: Any = self._open[self._files[published]]
        found = file.get_slice(published)
        return tuple(found.get_shape()), found.get_dtype()

    def check(self, expected: Mapping[str, Shape], *, optional: Iterable[str] = ()) -> None:
        """Check the folder's tensors against ``expected`` shapes.

        Raises:
            ModelError: lists the tensors that are missing, unknown, or of another shape or dtype.
        """
        faults = [f"{name} missing" for name in sorted(set(expected) - self.names)]
        faults += [f"{name} unknown" for name in sorted(self.names - set(expected) - set(optional))]
        for name in sorted(self.names & set(expected)):
            shape, dtype = self._header(name)
            if shape != expected[name]:
                faults.append(f"{name} is {list(shape)}, needs {list(expected[name])}")
            elif dtype not in DTYPES:
                faults.append(f"{name} is {dtype}, needs one of {', '.join(DTYPES)}")
        if faults:
            more = f" and {len(faults) - LISTED} more" if len(faults) > LISTED else ""
            listed = "; ".join(faults[:LISTED])
            raise ModelError(f"tensors: {len(faults)} do not fit config.json: {listed}{more}")

    def digest(self) -> str:
        """Return the SHA-256 of all tensors' names, dtypes, shapes and bytes, in order of name.

        It covers vision tensors, and not how the tensors are spread over files. Reads every byte.
        """
        whole = hashlib.sha256()
        for name in sorted(self._files):
            tensor = self._read(name)
            whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            whole.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return whole.hexdigest()


def _text_name(name: str, names: Container[str]) -> str:
    """Return the name without the prefix of multimodal folders, unless that is another tensor's."""
    long, short = TEXT_PREFIXES
    plain = short + name.removeprefix(long)
    return plain if name.startswith(long) and plain not in names else name


def _locate(folder: Path) -> dict[str, Path]:
    """Return the file that holds each tensor."""
    if (folder / INDEX).is_file():
        listed = read_json(folder, INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise ModelError(f"weight_map: missing in {INDEX}; needs a file for each tensor")
        return _confirm(folder, {name: folder / str(file) for name, file in listed.items()})
    single = folder / SINGLE
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"model: {str(folder)!r} has no *.safetensors; needs a model's folder")
    return {name: path for path in files for name in _names(path)}


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _confirm(folder: Path, listed: dict[str, Path]) -> dict[str, Path]:
    """Return ``listed`` if every shard exists and holds exactly the tensors of the index."""
    absent = sorted({path.name for path in listed.values() if not path.is_file()})
    if absent:
        raise ModelError(f"model: {str(folder)!r} lacks {', '.join(absent[:LISTED])}")
    held = {name: path for path in set(listed.values()) for name in _names(path)}
    wrong = sorted(set(held.items()) ^ set(listed.items()))
    if wrong:
        first = ", ".join(f"{name} in {path.name}" for name, path in wrong[:LISTED])
        raise ModelError(f"{INDEX}: does not fit its shards: {first}")
    return listed
