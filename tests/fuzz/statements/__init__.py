"""The statements a program is written with, by kind; importing a module registers those in it."""

from . import attention, control, layers, numeric, views, writes  # noqa: F401
