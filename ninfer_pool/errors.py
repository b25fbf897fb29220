"""The pool's exceptions. An expected refusal is never raised: it is a value, nothing changed."""

from __future__ import annotations


class PoolError(Exception):
    """Root of everything that this package raises on purpose.

    The message names the field, the value seen and what would be right.
    """


class ConfigError(PoolError):
    """A `PoolConfig` that cannot work: a size of zero, an unknown policy, a budget too small."""


class NamespaceError(PoolError):
    """A `Namespace` field of the wrong type or out of range."""


class PromptError(PoolError):
    """Tokens, positions, token types, media spans or boundaries that break the prompt's rules."""


class LeaseError(PoolError):
    """An engine broke a lease's rules: wrong tokens, past the reserve, used after its end."""


class TraceError(PoolError):
    """A trace that breaks its format; the message names the file, the line and the field."""


class GeometryError(PoolError):
    """Model sizes that are missing, not positive or do not add up."""


class ModelError(PoolError):
    """A model's folder that is missing, incomplete, of another shape or not supported."""


class StoreError(PoolError):
    """A tier's folder or file on disk that is damaged, in use, foreign or cannot be written."""


class RoomError(StoreError):
    """An entry in a file for which there is no room on the device now; later there may be."""


class UsageError(PoolError):
    """A command line option whose value cannot be used; the message names a right one."""


def install_hint(package: str, extra: str) -> str:
    """Return the text of an error for a missing package: its name and the command to install it."""
    return f"needs {package}; from a checkout, run pip install '.[{extra}]'"
