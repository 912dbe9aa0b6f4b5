"""Saying what happened to a model: `explain`, `find`, `why_not`, `bisect`, the report."""

from .. import pipeline  # noqa: F401  it tells the options which names there are
