"""Settings of the documentation: `make docs` builds it into `docs/_build/html`."""

from importlib import metadata

project = "Triptych"
author = "Triptych contributors"
copyright = "Triptych contributors"
release = metadata.version("triptych")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # signatures say them already
autodoc_member_order = "bysource"
suppress_warnings = ["myst.xref_missing"]  # links to sources of the repository, which are not part of the pages

default_role = "code"  # docstrings write code between single backticks
pygments_style = "friendly"
html_theme = "furo"
html_title = "Triptych"
