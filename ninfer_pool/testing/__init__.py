"""For our own tests and for engine authors: a symbolic engine, an oracle, the proof kit.

``from ninfer_pool.testing import conformance`` gives the function that proves an engine's
adapter. `symbolic`, `oracle`, `driver`, `adapter` and `toy` need nothing but the core;
`conformance` and `strategies` need Hypothesis and pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # while running it is the module, which can be called: nothing is imported here
    from ninfer_pool.testing.conformance import conformance

    __all__ = ["conformance"]
