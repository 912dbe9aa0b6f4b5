"""The option `tune`: when both ways of a rewrite are timed, and what is said of it."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import compiled_autograd

import triptych
from triptych import _private
from triptych.cost import Product, Waiting, Work, clock, decision, device_model, timing
from triptych.cost.clock import Clocked


def rule_with(before, after, **settings):
    """A rule that compares two forms, of which the model says so many seconds."""

    class Doubled(triptych.Rule):
        """x + x -> 2 * x"""

        def pattern(self, op, x):
            return op.add(x, x)

        def check(self, m, x):
            old, new = (Work.of(torch.device("cpu"), Waiting(seconds)) for seconds in (before, after))
            m.pays(old, new)

        def rewrite(self, op, x):
            return op.mul(x, 2)

    for name, value in settings.items():
        setattr(Doubled, name, value)
    return Doubled


def outcome(rule, **options):
    torch._dynamo.reset()
    explanation = triptych.explain(
        lambda x: x + x, torch.ones(4), options={"codegen": "eager", "add_rules": [rule], **options}
    )
    records = [r for r in explanation.passes if r.stage == "pre_grad" and (r.fired["doubled"] or r.declines)]
    (record,) = [r for r in records if r.fired["doubled"] or any(d.rule == "doubled" for d in r.declines)]
    told = [str(d) for d in record.decisions] or [d.reason for d in record.declines if d.rule == "doubled"]
    return bool(record.fired["doubled"]), told[0]


CLOSE, FAR = (10e-6, 8e-6), (10e-6, 2e-6)


@pytest.fixture
def asked(monkeypatch):
    """Each measurement says 3 and 9 microseconds."""
    questions = []

    def clocked(old, new):
        questions.append((old, new))
        return Clocked(3e-6), Clocked(9e-6)

    monkeypatch.setattr(decision, "clocked", clocked)
    return questions


@pytest.mark.parametrize(
    "modelled, tune, is_timed",
    [
        (CLOSE, "off", False), (CLOSE, "unsure", True), (CLOSE, "all", True),
        (FAR, "off", False), (FAR, "unsure", False), (FAR, "all", True),
    ],
)  # fmt: skip
def test_what_is_timed(modelled, tune, is_timed, asked):
    fired, told = outcome(rule_with(*modelled), tune=tune)
    assert bool(asked) == is_timed
    assert fired != is_timed  # timed, it loses
    assert told.endswith("measured" if is_timed else "modelled")


def test_the_model_stands_where_nothing_can_be_timed():
    fired, told = outcome(rule_with(*CLOSE), tune="all")
    assert fired and told == "8.0 us instead of 10.0 us, modelled"


def test_what_was_added_by_name_is_used_and_its_costs_are_recorded(asked):
    used = (True, "20.0 us instead of 10.0 us, used because it was added by name, modelled")
    assert outcome(rule_with(10e-6, 20e-6, asked_for=True)) == used
    assert outcome(rule_with(10e-6, 2e-6, asked_for=True)) == (True, "2.0 us instead of 10.0 us, modelled")
    assert not asked  # a measurement would change nothing
    outcome(rule_with(*CLOSE, asked_for=True), tune="all")
    assert asked


def test_seconds_are_no_description_of_work():
    class Seconds(rule_with(1e-3, 1e-4)):
        def check(self, m, x):
            m.pays(1e-3, 1e-4)

    with pytest.raises(Exception, match="two forms as triptych.cost.Work, not "):
        triptych.explain(lambda x: x + x, torch.ones(4), options={"codegen": "eager", "add_rules": [Seconds]})


def test_a_wrong_value_is_said():
    with pytest.raises(triptych.TriptychError, match="tune"):
        triptych.explain(lambda x: x, torch.ones(1), options={"tune": "sometimes"})


def test_what_is_timed_neither_sees_nor_changes_the_state_of_the_program(monkeypatch):
    monkeypatch.setattr(clock, "add_to_store", lambda *_: None)
    monkeypatch.setattr(clock, "HOST_BYTES", 1 << 30)
    dtypes = set()

    class Seen(Product):
        def prepare(self, device):
            a = self.left.random(device)
            return lambda: dtypes.add((a @ a).dtype)

    work = Work.of(torch.device("cpu"), Seen.sized(4, 4, 4, torch.float32))
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert clock.clocked(work, work)[0].seconds > 0
    assert dtypes == {torch.float32} and torch.equal(torch.get_rng_state(), before)


def test_neither_the_modes_of_the_compiler_nor_its_dispatcher_are_timed():
    keys = []

    def look():
        keys.append(torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher))

    with _private.enable_python_dispatcher():
        look()
        with timing.apart_from_the_program(torch.device("cpu")):
            look()
    assert keys == [True, False]


def test_a_default_device_is_not_that_of_what_is_timed():
    with torch.device("meta"):
        with timing.apart_from_the_program(torch.device("cpu")):
            assert torch.ones(2).device.type == "cpu"
        assert torch.ones(2).device.type == "meta"


def backward_of_a_product():
    x = torch.ones(4, 4, requires_grad=True)
    with torch.enable_grad():
        torch.autograd.grad((x @ x).sum(), x)


def test_hooks_on_saved_tensors_see_nothing_of_what_is_timed():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        with timing.apart_from_the_program(torch.device("cpu")):
            backward_of_a_product()
        assert not packed
        backward_of_a_product()
        assert packed


def test_compiled_autograd_does_not_capture_what_is_timed():
    captured = []
    with compiled_autograd._enable(lambda gm: captured.append(gm) or gm):
        with timing.apart_from_the_program(torch.device("cpu")):
            backward_of_a_product()
        assert not captured
        backward_of_a_product()
        assert captured


def test_the_model_of_a_cpu_follows_the_number_of_threads(monkeypatch):
    one = device_model("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert device_model("cpu").single == 4 * one.single
