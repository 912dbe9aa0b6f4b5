"""A graph and what is known about it: calls, facts, aliasing, dialect. Rules look at graphs through this."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from .. import _private
from ..options import Options
from .alias import Aliasing
from .autocast import AutocastRegions, is_bound
from .calls import Call, read
from .computed_facts import compute_facts, fake, no_pending_symbols, unify_fake_modes
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
"""In the `meta` of a graph module: whoever compiles the graph decomposes it first, as exported programs are, also those
that were decomposed before. A graph from AOTAutograd is not."""


def dialect_of(gm: GraphModule) -> str:
    """`aten` if every call is an ATen overload, a higher-order operator or Python arithmetic; else `torch`."""
    hop = _private.HigherOrderOperator
    for node in gm.graph.nodes:
        if node.op in ("call_method", "call_module"):
            return TORCH
        if node.op == "call_function" and not isinstance(node.target, (_private.OpOverload, hop)):
            value = fact(node)
            if node.target is _private.InvokeQuant:
                continue  # options of a higher-order operator, made in the graph
            is_arithmetic = getattr(node.target, "__module__", "") in ("_operator", "math", "torch", "builtins")
            if not is_arithmetic or (value is None and node.target is not operator.getitem):
                return TORCH
            is_element = node.target is operator.getitem and tensor_fact(node.args[0]) is None
            results = value if isinstance(value, (list, tuple)) else (value,)
            if any(isinstance(v, torch.Tensor) for v in results) and not is_element:
                return TORCH
    # a graph of Dynamo's in which only operators are left, since rewrites put them there
    inputs = [n.meta for n in gm.graph.nodes if n.op == "placeholder"]
    return TORCH if any("example_value" in meta and "val" not in meta for meta in inputs) else ATEN


DEFAULTS = Options()


class Program:
    """One graph module under change."""

    buffers: KnownBuffers | None = None
    """What the user's buffers hold, in a graph that Dynamo captured."""

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
        """Where the inputs come from, if the graph is one of a compile."""
        self.graph = gm.graph
        self.dialect = dialect_of(gm)
        self.fact_key = "val" if self.dialect == ATEN else "example_value"
        self.knowledge: Any = None
        """What is known of the elements of values, once somebody asks (`values.knowledge`)."""
        self.constant_numbers = itertools.count()
        """For names of tensors that are put into the graph's module."""
        self._calls: dict[Node, Call | None] = {}
        self.notes: dict[Node, Any] = {}
        """What was worked out about a node alone, and would be again and again; forgotten when it changes."""
        self._aliasing: Aliasing | None = None
        self._sizes: dict[Any, list[tuple[Node, int | None]]] | None = None
        self._of_backward: set[Node] = set()
        """What is computed from the gradients that come into a joint graph; known as long as the sizes are."""
        self.fake_mode = _private.fake_mode_of([fact(n) for n in self.graph.nodes if n.op == "placeholder"])
        if example_inputs and not self._has_facts():
            with_gradients = self.dialect == TORCH and torch.is_grad_enabled()
            mode = compute_facts(gm, example_inputs, self.fact_key, self.fake_mode, with_gradients)
            self.fake_mode = mode or self.fake_mode
        if self.fake_mode is None:
            self.fake_mode = _private.fake_mode_of([fact(n) for n in self.graph.nodes])
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
        """Is work on these values done once, before the first call? It is for weights that stay as they are."""
        return self.options.freeze and not self.is_training and all(self.weights.derive(n) for n in nodes)

    @functools.cached_property
    def is_training(self) -> bool:
        """Gradients of something that comes in will be asked for."""
        if not torch.is_grad_enabled():
            return False
        inputs = [tensor_fact(n) for n in self.graph.nodes if n.op in ("placeholder", "get_attr")]
        return any(t is not None and t.requires_grad for t in inputs)

    def changed(self, node: Node) -> None:
        """The arguments of a node are others now."""
        self._calls.pop(node, None)
        self.notes.pop(node, None)

    def respelled(self, node: Node) -> None:
        """A node calls the same thing in other words."""
        self.changed(node)
        if self._aliasing is not None:
            self._aliasing.refresh(node)

    def size_sources(self, expr: Any, at: Node) -> Iterator[tuple[Node, int | None]]:
        """Where a node can have a symbolic size from: an earlier node that is it, or a dim of a tensor that comes in.

        A value of the forward gets none from the backward, where the partitioner would have to put it too.
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

    def added(self, node: Node) -> None:
        self._note_sizes(node)
        if self._aliasing is not None:
            self._aliasing.add(node)

    def erased(self, node: Node) -> None:
        self._calls.pop(node, None)
        self.notes.pop(node, None)
        if is_bound(node):
            self.autocast_regions.forget(node)
        if self._aliasing is not None:
            self._aliasing.forget(node)

    @contextlib.contextmanager
    def moving(self, node: Node) -> Iterator[None]:
        """Around a move of a node to another place."""
        if is_bound(node):
            self.__dict__.pop("autocast_regions", None)  # read anew when somebody asks
        with contextlib.nullcontext() if self._aliasing is None else self._aliasing.moving(node):
            yield

    def value(self, node: Node) -> Value:
        return Value(self, node)

    # ---- facts for graphs that come without ----

    def _has_facts(self) -> bool:
        """Some calls have no value (a store, a region's end), so not every node can be asked."""
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        calls = [n for n in self.graph.nodes if n.op in ("call_function", "call_method", "call_module")]
        return all(fact(n) is not None for n in inputs) and (not calls or any(fact(n) is not None for n in calls))

    def attribute_fact(self, path: str) -> Any:
        """The fake value of a parameter or buffer of the graph's module, by its dotted path."""
        value = attribute(self.gm, path)
        return None if self.fake_mode is None else fake(self.fake_mode, value)

    def compute(self, node: Node, known: Callable[[Node], Any] = fact, at: Node | None = None) -> Any:
        """The value of a node on the facts of its operands, if it stood at `at`; None where one of them is unknown."""
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
        key = self.fact_memo.key(node.target, args, kwargs, self.autocast_around(at or node))
        value = self.fact_memo.recall(key)
        if value is not None:
            return value
        with self.computing(at or node):
            if node.op == "call_method":
                value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        self.fact_memo.remember(key, value, args, kwargs)
        return value

    @contextlib.contextmanager
    def computing(self, node: Node) -> Iterator[None]:
        """The surroundings in which the facts of a node that stands at `node` are computed."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_private.without_dispatch_modes())
            if self.fake_mode is not None:
                stack.enter_context(self.fake_mode)
                stack.enter_context(no_pending_symbols(self.fake_mode))
            if self.has_symbols:
                stack.enter_context(_private.enable_python_dispatcher())
            stack.enter_context(torch.no_grad())
            if self.dialect == ATEN:  # its casts are in the graph: those of the caller's autocast are no part of it
                stack.enter_context(_private.without_autocast())
            for region in self.autocast_around(node):
                stack.enter_context(torch.autocast(*region))
            yield

    def autocast_dtype(self, node: Node, device: torch.device) -> torch.dtype | None:
        """What products are rounded to where `node` stands; None without autocast."""
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
        return any(isinstance(v, symbols) for v in known) or any(
            isinstance(s, torch.SymInt) for v in known if isinstance(v, torch.Tensor) for s in v.shape
        )

    @functools.cached_property
    def unreadable(self) -> str | None:
        """Why nothing in this graph may be rewritten, if so."""
        return unreadable(self.graph) if self.dialect == TORCH else None

    @functools.cached_property
    def has_composites(self) -> bool:
        """Operators such as `linear` have a place in the graph: it has some, or will be decomposed again."""
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
