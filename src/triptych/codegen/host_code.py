"""Makes the Python code that Inductor generates for the host quicker. It is often the host that slows a program down.

Nothing here changes what is computed: kernels are launched directly (`launches.py`), and the layouts of all inputs are
compared in one call (`layout_checks.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .. import _private
from .launches import launch_kernels_directly
from .layout_checks import join_layout_checks


@contextlib.contextmanager
def quick_host_code() -> Iterator[None]:
    """Applies to the modules of generated code that are loaded inside."""
    loaded = _private.PyCodeCache.modules
    before = len(loaded)
    yield
    for module in loaded[before:]:
        launch_kernels_directly(module)
        join_layout_checks(module)
