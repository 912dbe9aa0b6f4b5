"""A graph and what is known about it: calls, facts, aliasing, dialect. Rules look at graphs through this."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, KeysView, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from .. import _private
from ..options import Options
from .alias import Aliasing
from .autocast import AutocastRegions, is_bound
from .call_index import CallIndex
from .calls import Call, read
from .computed_facts import compute_facts, fake, fake_mode_of, no_pending_symbols, unify_fake_modes
from .fact_memo import FactMemo
from .facts import fact, is_tangent, tensor_fact
from .modules import attribute
from .text import source_line, type_of
from .untrusted_facts import unreadable
from .weights import Weights

if TYPE_CHECKING:
    from .gradient_paths import GradientPaths
    from .origins import Origins
    from .values.buffers import KnownBuffers

TORCH, ATEN = "torch", "aten"

WILL_BE_DECOMPOSED = "triptych_will_be_decomposed"
"""Key in the `meta` of a graph module whose graph will be decomposed before it is compiled. That is so for exported
programs, even those that were decomposed before, and not for graphs from AOTAutograd."""


def dialect_of(gm: GraphModule) -> str:
    """`aten` if every call is an ATen overload, a higher-order operator or Python arithmetic; else `torch`."""
    hop = _private.HigherOrderOperator
    for node in gm.graph.nodes:
        if node.op in ("call_method", "call_module"):
            return TORCH
        if node.op == "call_function" and not isinstance(node.target, (_private.OpOverload, hop)):
            value = fact(node)
            if node.target is _private.InvokeQuant:
                continue  # an object with the options of a higher-order operator
            is_arithmetic = getattr(node.target, "__module__", "") in ("_operator", "math", "torch", "builtins")
            if not is_arithmetic or (value is None and node.target is not operator.getitem):
                return TORCH
            is_element = node.target is operator.getitem and tensor_fact(node.args[0]) is None
            results = value if isinstance(value, (list, tuple)) else (value,)
            if any(isinstance(v, torch.Tensor) for v in results) and not is_element:
                return TORCH
    # a graph from Dynamo may contain only operators, if rewrites put them there
    inputs = [n.meta for n in gm.graph.nodes if n.op == "placeholder"]
    return TORCH if any("example_value" in meta and "val" not in meta for meta in inputs) else ATEN


DEFAULTS = Options()


class Program:
    """One graph module under change."""

    buffers: KnownBuffers | None = None
    """What the user's buffers hold, in a graph that Dynamo captured."""
    _call_index: CallIndex | None = None
    """Built on first use."""

    def __init__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any] = (),
        options: Options = DEFAULTS,
        is_inference: bool = False,
    ) -> None:
        self.gm = gm
        self.options = options
        self.is_inference = is_inference
        """An ATen graph without a backward."""
        self.origins: Origins | None = None
        """Where the inputs come from, if the graph belongs to a compile."""
        self.graph = gm.graph
        self.dialect = dialect_of(gm)
        self.fact_key = "val" if self.dialect == ATEN else "example_value"
        self.knowledge: Any = None
        """What is known about the elements of values; created on first use (`values.knowledge`)."""
        self.constant_numbers = itertools.count()
        """Numbers for the names of tensors that are added to the graph's module."""
        self._calls: dict[Node, Call | None] = {}
        self.notes: dict[Node, Any] = {}
        """Cached results that depend on a single node; an entry is dropped when its node changes."""
        self._aliasing: Aliasing | None = None
        self._sizes: dict[Any, list[tuple[Node, int | None]]] | None = None
        self._of_backward: set[Node] = set()
        """Values computed from the tangents of a joint graph; filled together with `_sizes`."""
        self.fake_mode = fake_mode_of([fact(n) for n in self.graph.nodes if n.op == "placeholder"])
        if example_inputs and not self._has_facts():
            with_gradients = self.dialect == TORCH and torch.is_grad_enabled()
            mode = compute_facts(gm, example_inputs, self.fact_key, self.fake_mode, with_gradients)
            self.fake_mode = mode or self.fake_mode
        if self.fake_mode is None:
            self.fake_mode = fake_mode_of([fact(n) for n in self.graph.nodes])
        if self.fake_mode is not None:
            unify_fake_modes(gm, self.fact_key, self.fake_mode)

    # ---- facts ----

    def call(self, node: Node) -> Call | None:
        """The operation a node calls, by canonical name."""
        try:
            return self._calls[node]
        except KeyError:
            call = self._calls[node] = read(node)
            return call

    @property
    def _calls_by_op(self) -> CallIndex:
        if self._call_index is None:
            self._call_index = CallIndex(self.graph.nodes, self.call)
        return self._call_index

    def ops(self) -> KeysView[str]:
        """The operations that the graph calls."""
        return self._calls_by_op.ops()

    def calls_of(self, *ops: str) -> list[Node]:
        """The calls of these operations, in graph order, as the graph is now."""
        return self._calls_by_op.calls_of(ops)

    @property
    def aliasing(self) -> Aliasing:
        if self._aliasing is None:
            self._aliasing = Aliasing(self.graph, self.call)
        return self._aliasing

    @functools.cached_property
    def weights(self) -> Weights:
        return Weights(self.graph, self.aliasing)

    @functools.cached_property
    def is_joint(self) -> bool:
        """Forward and backward in one ATen graph."""
        return any(is_tangent(n) for n in self.graph.find_nodes(op="placeholder"))

    @functools.cached_property
    def gradient_paths(self) -> GradientPaths:
        from .gradient_paths import GradientPaths

        return GradientPaths(self)

    def computed_once(self, *nodes: Node) -> bool:
        """Is work on these values done once, before the first call? It is for values derived from frozen weights."""
        return self.options.freeze and not self.is_training and all(self.weights.derive(n) for n in nodes)

    @functools.cached_property
    def is_training(self) -> bool:
        """Does an input or attribute require a gradient, with grad mode on?"""
        if not torch.is_grad_enabled():
            return False
        inputs = [tensor_fact(n) for n in self.graph.nodes if n.op in ("placeholder", "get_attr")]
        return any(t is not None and t.requires_grad for t in inputs)

    def changed(self, node: Node) -> None:
        """Drop what is cached about a node whose arguments have changed."""
        self._index_again(node)
        self._calls.pop(node, None)
        self.notes.pop(node, None)

    def respelled(self, node: Node) -> None:
        """Update what is cached about a node that now spells the same operation differently."""
        self.changed(node)
        if self._aliasing is not None:
            self._aliasing.refresh(node)

    def size_sources(self, expr: Any, at: Node) -> Iterator[tuple[Node, int | None]]:
        """Where a node at `at` can get a symbolic size from: an earlier node whose value it is, or a dim of an input.

        A value of the forward gets no source from the backward: the partitioner would have to move the value there too.
        """
        if self._sizes is None:
            self._sizes = {}
            self._of_backward = set()
            for node in self.graph.nodes:
                self._note_sizes(node)
        for node, dim in self._sizes.get(expr, []):
            if not node._erased and node < at and (at in self._of_backward or node not in self._of_backward):
                yield node, dim

    def _note_sizes(self, node: Node) -> None:
        if self._sizes is None:
            return
        if is_tangent(node) or not self._of_backward.isdisjoint(node.all_input_nodes):
            self._of_backward.add(node)
        value = fact(node)
        if isinstance(value, torch.SymInt):
            self._sizes.setdefault(value.node.expr, []).append((node, None))
        elif node.op == "placeholder" and isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    self._sizes.setdefault(size.node.expr, []).append((node, dim))

    def _index_again(self, node: Node) -> None:
        if self._call_index is not None:
            self._call_index.changed(node)

    def added(self, node: Node) -> None:
        self._index_again(node)
        self._note_sizes(node)
        if self._aliasing is not None:
            self._aliasing.add(node)

    def erased(self, node: Node) -> None:
        self._index_again(node)
        self._calls.pop(node, None)
        self.notes.pop(node, None)
        if is_bound(node):
            self.autocast_regions.forget(node)
        if self._aliasing is not None:
            self._aliasing.forget(node)

    def move_before(self, node: Node, anchor: Node) -> None:
        """Move a node to another position of the graph."""
        if is_bound(node):
            self.__dict__.pop("autocast_regions", None)  # recomputed on the next use
        if self._aliasing is None:
            anchor.prepend(node)
        else:
            self._aliasing.move_before(node, anchor)

    def value(self, node: Node) -> Value:
        return Value(self, node)

    # ---- facts for graphs that come without ----

    def _has_facts(self) -> bool:
        """Does the graph come with facts? One call with a fact suffices: some calls have no value (a store, the end of
        a region)."""
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        calls = [n for n in self.graph.nodes if n.op in ("call_function", "call_method", "call_module")]
        return all(fact(n) is not None for n in inputs) and (not calls or any(fact(n) is not None for n in calls))

    def attribute_fact(self, path: str) -> Any:
        """The fake value of a parameter or buffer of the graph's module, by its dotted path."""
        value = attribute(self.gm, path)
        return None if self.fake_mode is None else fake(self.fake_mode, value)

    def compute(self, node: Node, known: Callable[[Node], Any] = fact, at: Node | None = None) -> Any:
        """The fact of a node, computed from those of its operands as if it were at `at`; None if one is unknown."""
        if node.op == "get_attr":
            return self.attribute_fact(str(node.target))
        unknown = False

        def known_value(n: Node) -> Any:
            nonlocal unknown
            value = known(n)
            unknown |= value is None
            return value

        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known_value)
        if unknown:
            return None
        memo = self.fact_memo
        key = memo.key(node.target, args, kwargs, self.autocast_around(at or node))
        value = memo.recall(key)
        if value is None:
            value = memo.recall_views(key, args, kwargs)
        if value is not None:
            return value
        with self.computing(at or node):
            if node.op == "call_method":
                value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        memo.remember(key, value, args, kwargs)
        return value

    @contextlib.contextmanager
    def computing(self, node: Node) -> Iterator[None]:
        """Context in which the fact of a node at the position of `node` is computed."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_private.without_dispatch_modes())
            if self.fake_mode is not None:
                stack.enter_context(self.fake_mode)
                stack.enter_context(no_pending_symbols(self.fake_mode))
            if self.has_symbols:
                stack.enter_context(_private.enable_python_dispatcher())
            stack.enter_context(torch.no_grad())
            if self.dialect == ATEN:  # its casts are in the graph: the caller's autocast must add none
                stack.enter_context(_private.without_autocast())
            for region in self.autocast_around(node):
                stack.enter_context(torch.autocast(*region))
            yield

    def without_guards(self) -> contextlib.AbstractContextManager[None]:
        """Context in which computing a fact adds no guard where torch looks at a symbolic size, mostly to know whether
        it is 0 or 1. The caller must know that the fact holds for all sizes."""
        sizes = None if self.fake_mode is None else self.fake_mode.shape_env
        return contextlib.nullcontext() if sizes is None else sizes.suppress_guards()

    def autocast_dtype(self, node: Node, device: torch.device) -> torch.dtype | None:
        """The dtype to which autocast casts matrix products at the position of `node`; None without autocast."""
        with contextlib.ExitStack() as stack:
            for region in self.autocast_around(node):
                stack.enter_context(torch.autocast(*region))
            active = self.dialect == TORCH and torch.is_autocast_enabled(device.type)
            return torch.get_autocast_dtype(device.type) if active else None

    def autocast_around(self, node: Node) -> list[tuple[Any, ...]]:
        """The arguments of the autocast regions around a node, from the outermost to the innermost."""
        return self.autocast_regions.around(node) if self.dialect == TORCH else []

    @functools.cached_property
    def fact_memo(self) -> FactMemo:
        return FactMemo(self.fake_mode)

    @functools.cached_property
    def autocast_regions(self) -> AutocastRegions:
        return AutocastRegions(self.graph)

    @functools.cached_property
    def has_symbols(self) -> bool:
        """Some size or number of the graph is a symbol."""
        symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
        known = [fact(n) for n in self.graph.nodes]
        return any(
            v._has_symbolic_sizes_strides if isinstance(v, torch.Tensor) else isinstance(v, symbols) for v in known
        )

    @functools.cached_property
    def unreadable(self) -> str | None:
        """Why nothing in this graph may be rewritten; None if it may."""
        return unreadable(self.graph) if self.dialect == TORCH else None

    @functools.cached_property
    def has_composites(self) -> bool:
        """May the graph contain composite operators such as `linear`? It may if it already does, or if it will be
        decomposed."""
        if self.gm.meta.get(WILL_BE_DECOMPOSED):
            return True
        overloads = {n.target for n in self.graph.nodes if isinstance(n.target, _private.OpOverload)}
        return any(_private.is_composite(o) for o in overloads)


class Value:
    """A value of the graph as rules see it: its facts, and its place."""

    __slots__ = ("node", "program")

    def __init__(self, program: Program, node: Node) -> None:
        self.program, self.node = program, node

    @property
    def fact(self) -> Any:
        return fact(self.node)

    @property
    def tensor(self) -> torch.Tensor | None:
        return tensor_fact(self.node)

    @property
    def known(self) -> bool:
        return self.fact is not None

    @property
    def is_tensor(self) -> bool:
        return self.tensor is not None

    @property
    def shape(self) -> Any:
        return tuple(self.tensor.shape) if self.tensor is not None else None

    @property
    def rank(self) -> Any:
        return self.tensor.dim() if self.tensor is not None else None

    @property
    def dtype(self) -> Any:
        return self.tensor.dtype if self.tensor is not None else None

    @property
    def device(self) -> Any:
        return self.tensor.device if self.tensor is not None else None

    @property
    def stride(self) -> Any:
        return self.tensor.stride() if self.tensor is not None else None

    @property
    def is_float(self) -> bool:
        return self.tensor is not None and self.tensor.dtype.is_floating_point

    @property
    def call(self) -> Call | None:
        return self.program.call(self.node)

    @property
    def op(self) -> str | None:
        call = self.call
        return call.op if call else None

    @property
    def users(self) -> list[Value]:
        return [Value(self.program, u) for u in self.node.users]

    @property
    def source(self) -> str:
        return source_line(self.node)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and other.node is self.node

    def __hash__(self) -> int:
        return hash(self.node)

    def __repr__(self) -> str:
        return f"{self.node.name}: {type_of(self.fact)}"
