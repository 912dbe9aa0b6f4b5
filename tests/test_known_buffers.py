"""Buffers as known values: read when a rule asks, and never trusted after a change that PyTorch can see."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import triptych
from triptych import _private
from triptych.errors import TriptychError
from triptych.ir.values import buffers
from triptych.ir.values.contents import holds_two_numbers, pattern_of
from triptych.passes.session import Session, watching

LENGTH = 16
DICT_TAGS = "use_recursive_dict_tags_for_guards"
X = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))


def causal(length: int = LENGTH) -> torch.Tensor:
    return torch.tril(torch.ones(length, length)).view(1, 1, length, length)


def window(length: int = LENGTH) -> torch.Tensor:
    """Another mask of the same shape, in which every row has a key."""
    return torch.tril(torch.ones(length, length)).triu(-2).view(1, 1, length, length)


class Attention(nn.Module):
    """nanoGPT's, with its mask in a buffer."""

    def __init__(self, mask: torch.Tensor | None = None) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("bias", causal() if mask is None else mask)

    def forward(self, x):
        batch, length, width = x.size()
        q, k, v = (p.view(batch, length, 2, -1).transpose(1, 2) for p in self.c_attn(x).split(width, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def attached(monkeypatch) -> list[buffers.SameContents]:
    """The guards that programs got."""
    collected: list[buffers.SameContents] = []
    attach = buffers.KnownBuffers.attach_guards

    def collect(self: buffers.KnownBuffers) -> None:
        collected.extend(self.guards.values())
        attach(self)

    monkeypatch.setattr(buffers.KnownBuffers, "attach_guards", collect)
    return collected


def compiled(model: Callable, codegen: str = "eager", **options) -> Callable:
    return torch.compile(
        model, backend=triptych.compile_fx, options={"codegen": codegen, "on_error": "raise", **options}
    )


def attention_calls(session: Session) -> list[dict]:
    nodes = session.graphs["pre_grad"].graph.nodes
    return [n.kwargs for n in nodes if n.target is F.scaled_dot_product_attention]


def is_causal(session: Session) -> bool:
    calls = attention_calls(session)
    return bool(calls) and all(c.get("is_causal") and c.get("attn_mask") is None for c in calls)


def guards(session: Session) -> list[buffers.SameContents]:
    return list(session.buffers.guards.values()) if session.buffers is not None else []


def same_as_eager(fast: Callable, model: nn.Module, x: torch.Tensor, training: bool) -> None:
    results = []
    for function in (fast, model):
        with contextlib.nullcontext() if training else torch.no_grad():
            x = x.detach().requires_grad_(training)
            y = function(x)
            if training:
                model.zero_grad()
                y.square().sum().backward()
        gradients = [x.grad, *(p.grad for p in model.parameters() if p.requires_grad)] if training else []
        results.append([y.detach(), *(g.clone() for g in gradients)])
    torch.testing.assert_close(*results, equal_nan=True)


# ---- every change that PyTorch can see ----

CHANGES: dict[str, Callable[[Attention], None]] = {}


def change(function):
    CHANGES[function.__name__] = function
    return function


@change
def written_in_place(model):
    model.bias.copy_(window())


@change
def one_element_written(model):
    model.bias[0, 0, 5, 1] = 0


@change
def written_through_a_view(model):
    model.bias.view(-1)[: LENGTH * 3].fill_(1)


@change
def written_in_inference_mode(model):
    with torch.inference_mode():
        model.bias.copy_(window())


@change
def transposed_in_place(model):
    model.bias.transpose_(-1, -2).add_(torch.eye(LENGTH))


@change
def assigned(model):
    model.bias = window()


@change
def put_into_the_dict(model):
    model._buffers["bias"] = window()


@change
def registered_again(model):
    """What was freed may be handed out again: same id, same address, same version."""
    for _ in range(20):
        del model.bias
        model.register_buffer("bias", window())


@change
def state_loaded(model):
    model.load_state_dict({**model.state_dict(), "bias": window()})


@change
def state_assigned(model):
    model.load_state_dict({**model.state_dict(), "bias": window()}, assign=True)


@change
def swapped(model):
    torch.utils.swap_tensors(model.bias, window())


@change
def given_other_memory(model):
    model.bias.data = window()


@change
def set_(model):
    model.bias.set_(window())


@change
def transposed_behind_the_same_address(model):
    """The same object, address and version; only the strides differ."""
    model.bias.data = model.bias.data.mT


@change
def cast(model):
    model.double()
    model.bias.copy_(window())


@change
def cast_there_and_back(model):
    model.double()
    model.bias.copy_(window())
    model.float()


@change
def applied(model):
    model._apply(lambda t: t if t.dim() < 4 else window())


@change
def made_a_parameter(model):
    mask = window()
    del model.bias
    model.bias = nn.Parameter(mask, requires_grad=False)


@change
def with_rows_without_keys(model):
    model.bias.copy_(causal())
    model.bias[..., 3, :] = 0


@change
def wider(model):
    model.bias = torch.ones(1, 1, LENGTH + 3, LENGTH + 3).tril(2)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name, training, attached):
    model = Attention()
    fast = compiled(model)
    for _ in range(4):  # Dynamo skips guards that held before, where it thinks it can
        same_as_eager(fast, model, X, training)
    assert len(attached) == 1  # nobody watches: graphs that are kept have weak references, which forbid swap_tensors
    compiles = counters["stats"]["unique_graphs"]
    CHANGES[name](model)
    x = X.to(model.c_proj.weight.dtype)
    for _ in range(2):
        same_as_eager(fast, model, x, training)
    del model.bias
    model.register_buffer("bias", causal().to(x.dtype))
    same_as_eager(fast, model, x, training)
    CHANGES[name](model)
    same_as_eager(fast, model, x.to(model.c_proj.weight.dtype), training)
    assert counters["stats"]["unique_graphs"] - compiles <= 3


@pytest.mark.skipif(not hasattr(_private.dynamo_config, DICT_TAGS), reason="this torch has no such setting")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", ["written_in_place", "assigned", "registered_again", "given_other_memory", "set_"])
def test_guards_are_not_skipped_while_dicts_of_buffers_are_the_same(name, nested):
    """Dynamo takes tensors for immutable, and skips the guards on them; the default of torch 2.11."""
    attention = Attention()
    model = nn.Sequential(nn.Sequential(attention)) if nested else attention
    with _private.dynamo_config.patch({DICT_TAGS: True}):
        fast = compiled(model)
        for _ in range(5):
            same_as_eager(fast, model, X, training=False)
        CHANGES[name](attention)
        same_as_eager(fast, model, X, training=False)


@pytest.mark.parametrize("name", [
    "written_in_place", "assigned",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("registered_again", "state_loaded", "swapped", "cast")),
])  # fmt: skip
def test_changes_are_noticed_by_kernels(name):
    model = Attention()
    fast = compiled(model, "inductor")
    same_as_eager(fast, model, X, training=False)
    CHANGES[name](model)
    same_as_eager(fast, model, X.to(model.c_proj.weight.dtype), training=False)


def test_changes_between_forward_and_backward_of_kernels():
    model = Attention()
    fast = compiled(model, "inductor")
    for _ in range(2):
        same_as_eager(fast, model, X, training=True)
        model.bias.copy_(window())


def test_changes_are_noticed_with_freeze():
    model = Attention()
    fast = compiled(model, freeze=True)
    same_as_eager(fast, model, X, training=False)
    for name in ("written_in_place", "assigned", "registered_again"):
        CHANGES[name](model)
        same_as_eager(fast, model, X, training=False)


def test_gradients_on_and_off_share_a_buffer():
    model = Attention()
    fast = compiled(model)
    for _ in range(2):
        for training in (True, False, True):
            same_as_eager(fast, model, X, training)
        model.bias.copy_(window())


# ---- who shares what ----


def test_models_share_a_program_as_long_as_their_buffers_hold_the_same():
    alike, other = [Attention() for _ in range(12)], Attention(window())
    fast = compiled(lambda model, x: model(x))
    with watching() as sessions, torch.no_grad():
        for _ in range(3):
            for model in alike:
                torch.testing.assert_close(fast(model, X), model(X))
        assert len(sessions) == 1 and is_causal(sessions[0])
        (guard,) = guards(sessions[0])
        assert guard.reads == 11  # each of the others once
        for _ in range(3):
            for model in (other, alike[0]):
                torch.testing.assert_close(fast(model, X), model(X))
    assert len(sessions) == 2
    assert guard.reads == 12


def test_layers_are_read_once_each():
    model = nn.Sequential(*(Attention() for _ in range(4)))
    fast = compiled(model)
    with watching() as sessions, torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(X), model(X))
    (session,) = sessions
    assert len(attention_calls(session)) == 4 and is_causal(session)
    assert session.buffers.reads == 4
    assert all(guard.reads == 0 for guard in guards(session))


def test_the_same_contents_loaded_cost_no_recompilation():
    model = Attention()
    fast = compiled(model)
    with watching() as sessions, torch.no_grad():
        fast(X)
        for _ in range(3):
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            torch.testing.assert_close(fast(X), model(X))
    assert len(sessions) == 1
    assert guards(sessions[0])[0].reads == 3


def test_a_buffer_that_changes_on_every_call_is_compiled_for_twice():
    model = Attention()
    fast = compiled(model)
    with watching() as sessions, torch.no_grad():
        for i in range(10):
            model.bias.copy_(causal())
            model.bias[..., 0] = i + 1
            torch.testing.assert_close(fast(X), model(X))
    assert len(sessions) == 2 and sessions[1].buffers.reads == 0


def test_a_buffer_that_is_written_on_every_call_is_not_compared_on_every_call():
    model = Attention()
    fast = compiled(model)
    with watching() as sessions, torch.no_grad():
        for _ in range(2 * buffers.COMPARISONS):
            model.bias.mul_(1)
            torch.testing.assert_close(fast(X), model(X))
    assert len(sessions) == 2 and sessions[1].buffers.reads == 0
    assert guards(sessions[0])[0].reads == buffers.COMPARISONS


def test_no_memory_is_kept():
    model = Attention()
    memory = _private.StorageWeakRef(model.bias.untyped_storage())
    same = buffers.SameContents(model.bias, (0, ""))
    del model
    gc.collect()
    assert memory.expired() and same is not None


# ---- what is read ----


def test_symbolic_lengths():
    model = Attention()
    fast = torch.compile(model, backend=triptych.compile_fx, dynamic=True, options={"codegen": "eager"})
    with watching() as sessions, torch.no_grad():
        for length in (5, 7, 16):
            torch.testing.assert_close(fast(X.new_ones(2, length, 8)), model(X.new_ones(2, length, 8)))
    assert is_causal(sessions[-1]) and len(sessions) <= 2


class Spellings(nn.Module):
    """The same mask in the spellings of other models."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        keep = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        masks = {
            "where": keep,
            "fill": ~keep,
            "bytes": keep.to(torch.uint8),
            "bias": torch.zeros(LENGTH, LENGTH).masked_fill(~keep, -math.inf),
            "attn_mask": keep.expand(1, 1, LENGTH, LENGTH),
            "window": keep.triu(-3),
        }
        self.mask = nn.Buffer(masks[name])

    def forward(self, x):
        length = x.shape[-2]
        mask = self.mask[..., :length, :length]
        if self.name == "attn_mask":
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        scores = x @ x.transpose(-1, -2) * 0.3
        if self.name == "bias":
            scores = scores + mask
        elif self.name == "fill":
            scores = scores.masked_fill(mask, -1e9)
        elif self.name == "bytes":
            scores = scores.masked_fill(mask == 0, -math.inf)
        else:
            scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ x


@pytest.mark.parametrize("length", [12, LENGTH])
@pytest.mark.parametrize("name", ["where", "fill", "bytes", "bias", "attn_mask", "window"])
def test_spellings_of_masks(name, length):
    model, x = Spellings(name), torch.randn(2, 4, length, 8)
    with watching() as sessions:
        torch.testing.assert_close(compiled(model)(x), model(x))
    assert is_causal(sessions[0]) == (name != "window")
    assert len(attention_calls(sessions[0])) == len(guards(sessions[0])) == 1


def test_the_option_turns_it_off():
    for options in ({"known_buffers": False}, {"known_buffers_bytes": 1000}):
        model = Attention()
        with watching() as sessions, torch.no_grad():
            torch.testing.assert_close(compiled(model, **options)(X), model(X))
        assert attention_calls(sessions[0]) and not is_causal(sessions[0])
        assert not guards(sessions[0])
    with pytest.raises(TriptychError, match="known_buffers_bytes"):
        triptych.Options(known_buffers_bytes=-1)
    with pytest.raises(TriptychError, match="known_buffers"):
        triptych.Options(known_buffers="yes")


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(16.0), 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1))

    def forward(self, x):
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        turned = torch.cat([-x[..., 4:], x[..., :4]], dim=-1)
        return x * cos + turned * sin


def test_rotary_tables_are_neither_guarded_nor_changed():
    model = Rotary()
    fast = compiled(model)
    with watching() as sessions, torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
        model.cos.mul_(2)
        torch.testing.assert_close(fast(X), model(X))
    assert len(sessions) == 1 and not guards(sessions[0])


def test_nobody_asks_about_statistics():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(12), nn.ReLU()).eval()
    with watching() as sessions, torch.no_grad():
        torch.testing.assert_close(compiled(model)(X), model(X))
    assert sessions[0].buffers.reads == 0


class Writing(Attention):
    """Writes the mask before it reads it."""

    def forward(self, x):
        self.bias[..., 0, 1].add_(1)
        return super().forward(x)


def test_a_buffer_that_the_program_writes_is_not_read():
    model, reference = Writing(), Writing()
    reference.load_state_dict(model.state_dict())
    fast = compiled(model)
    with watching() as sessions, torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(X), reference(X))
    assert len(sessions) == 1 and sessions[0].buffers.reads == 0


def test_memory_that_another_input_writes():
    model = Attention()

    def write_and_attend(row, x):
        row.fill_(1)
        return model(x)

    fast = compiled(write_and_attend)
    with watching() as sessions, torch.no_grad():
        y = fast(model.bias[0, 0, 2], X)
        torch.testing.assert_close(y, model(X))
    assert all(session.buffers.reads == 0 for session in sessions)


def test_memory_that_a_parameter_shares():
    """`weight.data` has a version counter of its own: an optimizer's step leaves the buffer's as it is."""
    linear = nn.Linear(8, 8)
    nn.init.zeros_(linear.weight)
    linear.register_buffer("mask", linear.weight.data)

    def masked(x):
        return linear(x).masked_fill(linear.mask == 0, 0.0).sum(), F.scaled_dot_product_attention(x, x, x, linear.mask)

    fast, x = compiled(masked), torch.randn(2, 8, 8)
    with watching() as sessions:
        for _ in range(2):
            torch.testing.assert_close(fast(x), masked(x))
            with torch.no_grad():
                linear.weight.add_(1)
    assert sessions[0].buffers.reads == 0


def unread(tensor: torch.Tensor) -> bool:
    return not buffers.is_readable(tensor)


def test_what_is_never_read():
    with torch.inference_mode():
        inference = torch.ones(4)
    assert unread(nn.Parameter(torch.ones(4), requires_grad=False)) and unread(torch.ones(4, requires_grad=True))
    assert unread(inference) and unread(torch.ones(4, device="meta")) and unread(torch.ones(4, dtype=torch.complex64))
    assert unread(torch.eye(3).to_sparse()) and not unread(torch.ones(4))


def test_functional_call_with_another_buffer():
    model = Attention()
    fast = compiled(lambda bias, x: torch.func.functional_call(model, {"bias": bias}, (x,)))
    with torch.no_grad():
        for bias in (causal(), window(), causal()):
            expected = torch.func.functional_call(model, {"bias": bias}, (X,))
            torch.testing.assert_close(fast(bias, X), expected)


def test_what_was_told_is_part_of_the_cache_key():
    digests = set()
    for mask in (causal(), window(), causal()):
        torch.compiler.reset()
        with watching() as sessions, torch.no_grad():
            compiled(Attention(mask))(X)
        digests.add(sessions[0].buffers.digest)
    assert len(digests) == 2 and "" not in digests


def test_verified():
    model = Attention()
    with watching() as sessions, torch.no_grad():
        torch.testing.assert_close(compiled(model, verify="each")(X), model(X))
    assert is_causal(sessions[0]) and not sessions[0].warnings


# ---- patterns of contents ----

PATTERNS = {
    "zeros": torch.zeros(3, 4),
    "negative zeros": -torch.zeros(3, 4),
    "nan": torch.full((2, 2), math.nan),
    "lower": torch.ones(5, 5).tril(),
    "lower of booleans": torch.ones(2, 5, 5, dtype=torch.bool).tril(),
    "lower of integers": torch.ones(5, 5, dtype=torch.int32).tril(),
    "above": torch.full((1, 4, 4), -math.inf).triu(1),
    "wide": torch.ones(3, 7).tril(2),
    "tall": torch.ones(7, 3).tril(-2),
    "one row": torch.ones(1, 7).tril(2),
    "one column": torch.ones(7, 1).tril(-2),
    "range": torch.arange(3, 40, 5),
    "range of two dims": torch.arange(12).view(3, 4).expand(2, 3, 4),
    "falling": torch.arange(10, dtype=torch.int8).flip(0),
}
NO_PATTERNS = {
    "random": torch.rand(4, 4),
    "zeros of both signs": torch.tensor([[0.0, -0.0], [-0.0, 0.0]]),
    "three numbers": torch.ones(4, 4).tril() + torch.eye(4),
    "window": torch.ones(6, 6).tril().triu(-2),
    "another triangle": torch.stack([torch.ones(4, 4).tril(), torch.ones(4, 4).tril(1)]),
    "corner": torch.ones(4, 4).tril().index_put((torch.tensor(2), torch.tensor(0)), torch.tensor(0.0)),
    "nearly a range": torch.tensor([0, 1, 2, 3, 5]),
    "empty": torch.ones(0, 3),
    "NaN beside a number": torch.tensor([[math.nan, 1.0], [1.0, 1.0]]),
}


def rebuilt(value: torch.Tensor) -> torch.Tensor:
    """The tensor that the pattern says, element by element."""
    elements = pattern_of(value)
    assert elements is not None
    made = torch.empty_like(value, memory_format=torch.contiguous_format)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in value.shape)).view(-1, value.dim()).tolist():

        def at(pattern, place=place):
            return pattern.start + sum(s * i for s, i in zip(pattern.steps, place))

        leaves = [
            leaf for where, leaf in elements.pieces
            if where.always or any(all(at(p) >= 0 for p in clause) for clause in where.clauses)
        ]  # fmt: skip
        (leaf,) = leaves
        made[tuple(place)] = leaf if isinstance(leaf, torch.Tensor) else at(leaf)
    return made


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name):
    value = PATTERNS[name]
    for laid_out in (value, value.mT.contiguous().mT if value.dim() > 1 else value):
        made = rebuilt(laid_out)
        torch.testing.assert_close(made, value, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(made.double().signbit(), value.double().signbit())


@pytest.mark.parametrize("name", NO_PATTERNS)
def test_no_pattern(name):
    assert pattern_of(NO_PATTERNS[name]) is None


def test_two_numbers():
    assert holds_two_numbers(NO_PATTERNS["window"]) and holds_two_numbers(torch.ones(3))
    assert not holds_two_numbers(NO_PATTERNS["three numbers"]) and not holds_two_numbers(torch.ones(0))
    assert not holds_two_numbers(NO_PATTERNS["NaN beside a number"])
