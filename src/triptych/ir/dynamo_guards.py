"""Guards that we add to a program which Dynamo compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import _private


def source_name(source: Any) -> str:
    """The expression by which Dynamo finds a value: `L['self']._buffers['mask']`. A method until torch 2.11."""
    return source.name() if callable(source.name) else source.name


def add_guard(source: Any, create: Callable[[Any, Any], None]) -> None:
    """One more guard of the program that Dynamo is compiling; `create(builder, guard)` runs when guards are built."""
    _private.TracingContext.get().guards_context.dynamo_guards.add(source.make_guard(create))


def add_lambda_guard(builder: Any, guard: Any, check: Callable[[Any], bool], what: str) -> None:
    """Let a guard call `check` with the tensor of its source; `what` is said where recompilations are explained.

    Dynamo takes tensors for immutable: while the dict of a module's buffers is the same, it may skip the guards
    on them (`skip_tensor_guards_with_matching_dict_tags`, `use_recursive_dict_tags_for_guards`). It always evaluates
    those of a tensor that has guards on a property, as symbolic sizes are, and so this one asks for a property, too.
    """
    manager = builder.get_guard_manager(guard)
    builder.get_guard_manager_from_source(_private.AttrSource(guard.originating_source, "_version"))
    text = [f"{source_name(guard.originating_source)} {what}"]
    try:
        manager.add_lambda_guard(check, text, guard.user_stack)
    except TypeError:  # an older torch takes no stack
        manager.add_lambda_guard(check, text)


def saves_guards() -> bool:
    """Are guards written to disk, where one that holds a function of ours cannot go?"""
    return bool(getattr(_private.dynamo_config, "caching_precompile", False))
