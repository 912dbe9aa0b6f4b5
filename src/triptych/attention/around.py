"""What is made ready around an attention: uses of the scores that ask for their shape alone, and torch's own layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir.facts import fact, set_fact, tensor_fact
from ..ir.program import Program
from ..passes.base import PassRun
from ..rewrite.emit import Emitter
from .build import softmax_call
from .contraction import contraction_of
from .layer import LAYER
from .masks import one_number


def drop_unread(run: PassRun) -> None:
    """What nobody reads is no use of scores and probabilities: as their mean over the heads, made and not returned"""
    below: set[Node] = set()
    for node in run.program.graph.nodes:
        if contraction_of(run.program, node) is not None or not below.isdisjoint(node.all_input_nodes):
            below.add(node)
    for node in reversed(list(run.program.graph.nodes)):
        if node.users or node.op == "output" or node not in below:
            continue
        if run.spent:
            return
        if run.program.aliasing.effects(node).pure:
            run.rewriter.erase(node)
            run.fired("unread")


def idle_regions(run: PassRun) -> None:
    """A region of autocast in which all is computed as it would be without: nothing need stop at its ends"""
    for node in list(run.program.graph.nodes):
        if getattr(node.target, "__name__", "") != "_enter_autocast" or len(node.users) != 1 or run.spent:
            continue
        if _changes_nothing(run.program, node, next(iter(node.users))):
            for end in [*node.users, node]:
                run.rewriter.erase(end)
            run.fired("idle_region")


def _changes_nothing(program: Program, start: Node, end: Node) -> bool:
    """By their dtypes: autocast rounds operands before a product, which shows in the result, or widens them."""
    if start.args[2:3] == (False,) and program.autocast_dtype(start, torch.device(str(start.args[0]))) is None:
        return True
    node = start.next
    while node is not end:
        call = program.call(node)
        if node.op == "root" or call is None or call.mutates or program.aliasing.effects(node).barrier:
            return False
        was, now = fact(node), program.compute(node, at=start)
        if [_dtype(x) for x in _flat(was)] != [_dtype(x) for x in _flat(now)]:
            return False
        node = node.next
    return True


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _dtype(value: Any) -> Any:
    return value.dtype if isinstance(value, torch.Tensor) else type(value)


def shapes_of_their_own(run: PassRun, path: list[Node]) -> None:
    """full_like(scores, 1) -> full(shape, 1) and scores.size(3) -> key.size(2): a shape needs no scores"""
    for node in path:
        for user in list(node.users):
            call = run.program.call(user)
            if call is None or call.mutates or call.args.get("self") is not node:
                continue
            if call.op == "full_like" and not set(call.args) - {"self", "fill_value", "dtype", "device"}:
                made, value = tensor_fact(user), call.args["fill_value"]
                if made is not None and not isinstance(value, Node):
                    run.replace("shape_of_scores", user, functools.partial(_full, made, value))
            elif call.op == "size":
                _size(run, user)


def _full(made: torch.Tensor, value: Any, op: Emitter) -> Any:
    return op.full(list(made.shape), value, dtype=made.dtype, device=made.device)


def _size(run: PassRun, node: Node) -> None:
    sizes = [u for u in node.users if isinstance(fact(u), torch.SymInt)] if isinstance(fact(node), tuple) else [node]
    for size in sizes:
        symbol = fact(size)
        if isinstance(symbol, torch.SymInt):
            run.replace("shape_of_scores", size, functools.partial(_number, symbol))
    if not node._erased and not node.users:
        run.rewriter.erase(node)


def _number(symbol: torch.SymInt, op: Emitter) -> Any:
    return op.size_node(symbol)


def zero_for_nan(run: PassRun, node: Node) -> None:
    """p.masked_fill(isnan(p), 0) -> nan_to_num(p, 0), which leaves infinity"""
    call = run.program.call(node) if not node._erased else None
    if call is None or call.mutates or call.op not in ("masked_fill", "where"):
        return
    names = ("self", "mask", "value") if call.op == "masked_fill" else ("other", "condition", "self")
    if any(name not in call.args for name in names):  # `where(mask)` asks for places
        return
    value, mask, number = (call.args[name] for name in names)
    test = run.program.call(mask) if isinstance(mask, Node) else None
    found, made, zero = tensor_fact(value), tensor_fact(node), one_number(run.program, number)
    if test is None or test.mutates or found is None or made is None or zero is None or zero[0] != 0:
        return
    is_nan = test.op == "isnan" or (test.op == "ne" and test.args.get("other") is value)
    if not isinstance(value, Node) or softmax_call(run.program, value) is None:
        return
    if is_nan and test.args.get("self") is value:

        def make(op: Emitter) -> Any:
            return op.nan_to_num(value, 0.0, math.inf, -math.inf)

        run.replace("zero_for_nan", node, make, covered=[mask, *zero[1]])


def without_weights(run: PassRun, name: str, node: Node) -> None:
    """nn.MultiheadAttention, asked for weights that nobody reads -> not asked for them: so it calls the fused kernel"""
    call = run.program.call(node)
    if call is None or call.op != LAYER or not call.args.get("need_weights") or not isinstance(fact(node), tuple):
        return
    users = list(node.users)
    if len(users) != 1 or (read := run.program.call(users[0])) is None or read.op != "getitem":
        return run.declined(name, node, "the weights are used")
    if read.args["index"] != 0:
        return run.declined(name, node, "the weights are used")
    if any(call.args.get(k) is not None for k in ("attn_mask", "key_padding_mask")) or call.args.get("is_causal"):
        return run.declined(name, node, "queries may be without a key")
    draws = run.options.codegen == "inductor" and not run.options.fallback_random
    if call.args.get("training") and call.args.get("dropout_p") and not draws:
        return run.declined(name, node, "dropout would draw other numbers than eager")

    if run.spent:
        return None
    run.rewriter.set_arguments(node, (), {**call.args, "need_weights": False})
    set_fact(node, (fact(node)[0], None), run.program.fact_key)
    run.fired(name)
    return None
