"""The bundled model runner: a hybrid model on CPU or CUDA (extra ``runner``)."""

from __future__ import annotations

from pathlib import Path

from ninfer_pool.errors import install_hint

try:
    from ninfer_pool.runner.chat import Chat, Rendered
    from ninfer_pool.runner.media import Media, media_digest
    from ninfer_pool.runner.model import Model
    from ninfer_pool.runner.request import Request, RequestOutput, Sequence
    from ninfer_pool.runner.runner import Runner
    from ninfer_pool.runner.sampling import Sampling
    from ninfer_pool.runner.scheduler import Scheduler
    from ninfer_pool.runner.tokenizer import Tokenizer
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("ninfer_pool"):
        raise
    message = install_hint(error.name, "runner")
    raise ModuleNotFoundError(message, name=error.name) from None

TINY = Path(__file__).parent / "tiny"
"""The folder of the small trained model that comes with the package."""

__all__ = [
    "TINY",
    "Chat",
    "Media",
    "Model",
    "Rendered",
    "Request",
    "RequestOutput",
    "Runner",
    "Sampling",
    "Scheduler",
    "Sequence",
    "Tokenizer",
    "media_digest",
]
