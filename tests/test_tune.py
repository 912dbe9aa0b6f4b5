"""The option `tune`: when both ways of a rewrite are timed, and what is said of it."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch._dynamo import compiled_autograd

import triptych
from triptych import _private
from triptych.cost import Layout, device_model, measure, timing
from triptych.cost import timed as timed_costs
from triptych.cost.device import USUAL
from triptych.cost.store import store_path


def rule_with(before, after, times, asked, **how):
    class Doubled(triptych.Rule):
        """x + x -> 2 * x"""

        def pattern(self, op, x):
            return op.add(x, x)

        def check(self, m, x):
            def measure():
                asked.append(True)
                return times

            m.pays(before, after, measure=measure, **how)

        def rewrite(self, op, x):
            return op.mul(x, 2)

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


@pytest.mark.parametrize(
    "modelled, tune, is_timed",
    [
        (CLOSE, "off", False), (CLOSE, "unsure", True), (CLOSE, "all", True),
        (FAR, "off", False), (FAR, "unsure", False), (FAR, "all", True),
    ],
)  # fmt: skip
def test_what_is_timed(modelled, tune, is_timed):
    asked = []
    fired, told = outcome(rule_with(*modelled, (3e-6, 9e-6), asked), tune=tune)
    assert bool(asked) == is_timed
    assert fired != is_timed  # timed, it loses
    assert told.endswith("measured" if is_timed else "modelled")


def test_the_model_stands_where_nothing_can_be_timed():
    asked = []
    fired, told = outcome(rule_with(*CLOSE, None, asked), tune="all")
    assert asked and fired and told == "8.0 us instead of 10.0 us, modelled"


def test_a_rule_may_say_that_the_model_knows_little():
    asked = []
    outcome(rule_with(*FAR, None, asked, error=100.0))
    assert asked


def test_a_sure_gain_is_not_timed():
    asked = []
    assert outcome(rule_with(*CLOSE, (1.0, 2.0), asked, sure=True))[0] and not asked


def test_what_was_added_by_name_is_used_and_its_costs_are_recorded():
    asked = []
    used = (True, "20.0 us instead of 10.0 us, used because it was added by name, modelled")
    assert outcome(rule_with(10e-6, 20e-6, None, asked, by_name=True)) == used
    assert outcome(rule_with(10e-6, 2e-6, None, asked, by_name=True)) == (True, "2.0 us instead of 10.0 us, modelled")
    assert not asked  # a measurement would change nothing
    outcome(rule_with(*CLOSE, (3e-6, 9e-6), asked, by_name=True), tune="all")
    assert asked


def test_a_wrong_value_is_said():
    with pytest.raises(triptych.TriptychError, match="tune"):
        triptych.explain(lambda x: x, torch.ones(1), options={"tune": "sometimes"})


def test_what_is_timed_neither_sees_nor_changes_the_state_of_the_program(monkeypatch):
    monkeypatch.setattr(measure, "add_to_store", lambda *_: None)
    dtypes = set()

    def prepare():
        a = torch.randn(4, 4)
        return lambda: dtypes.add((a @ a).dtype)

    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert measure.measured("a product of this test", torch.device("cpu"), prepare) > 0
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


def test_works_that_are_compared_are_timed_in_turns(monkeypatch):
    rounds = []

    def on_cpu(work, times):
        rounds.append((work, times))
        return work / 1e4

    monkeypatch.setattr(timing, "_on_cpu", on_cpu)
    assert timing.seconds_in_turns([1, 2], rounds=3) == [1e-4, 2e-4]
    assert rounds == [(1, 1), (2, 1)] * 2 + [(1, 5), (2, 2)] * 3
    rounds.clear()
    assert timing.seconds_in_turns([1, 2], most=2e-4) == [1e-4, 2e-4] and len(rounds) == 2  # too long for more


def test_times_in_turns_are_remembered_together(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "_known", {})
    ran = []

    def question(name):
        return name, lambda: lambda: ran.append(name)

    times = measure.measured_in_turns(torch.device("cpu"), question("a"), question("b"))
    assert set(ran) == {"a", "b"} and all(time > 0 for time in times)
    ran.clear()
    monkeypatch.setattr(measure, "_known", {})
    assert measure.measured_in_turns(torch.device("cpu"), question("a"), question("b")) == times and not ran  # from disk
    measure.measured_in_turns(torch.device("cpu"), question("b"), question("c"))
    assert set(ran) == {"b", "c"}

    def broken():
        raise RuntimeError("no such kernel")

    assert measure.measured_in_turns(torch.device("cpu"), question("a"), ("d", broken)) is None


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """The times that the next measurements give, in an empty store."""
    given: list[list[float]] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "_known", {})
    monkeypatch.setattr(measure, "seconds_in_turns", lambda works: given.pop(0))
    return given


def asked(*names):
    return measure.measured_in_turns(torch.device("cpu"), *((name, lambda: lambda: None) for name in names))


def test_times_without_onednn_are_not_those_with_it(answers):
    answers += [[4.0, 3.0], [8.0, 7.0]]
    assert asked("a", "b") == (4.0, 3.0)
    with torch.backends.mkldnn.flags(enabled=False):
        assert asked("a", "b") == (8.0, 7.0)


def test_times_of_different_moments_are_not_compared(answers):
    answers += [[4.0, 3.0], [8.0, 7.0]]
    assert (asked("apart", "one way"), asked("apart", "another way")) == ((4.0, 3.0), (8.0, 7.0))
    assert asked("apart", "one way") == (4.0, 3.0)
    measure._known.clear()
    assert (asked("apart", "one way"), asked("apart", "another way")) == ((4.0, 3.0), (8.0, 7.0))  # from disk


def test_a_process_goes_on_using_what_it_has_measured(answers):
    answers += [[4.0, 3.0], [5.0, 5.0], [1.0, 2.0]]
    assert asked("a", "b") == (4.0, 3.0)
    in_this_process = dict(measure._known)
    measure._known.clear()
    store_path(measure.MEASURED).unlink()
    assert asked("a", "b") == (5.0, 5.0)  # as another process, which measured at the same time, would store it
    measure._known.clear()
    measure._known.update(in_this_process)
    asked("c", "d")  # reads the store
    assert asked("a", "b") == (4.0, 3.0)


def test_the_model_of_a_cpu_follows_the_number_of_threads(monkeypatch):
    one = device_model("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert device_model("cpu").single == 4 * one.single


# ---- products and copies that are timed ----

GPU = torch.device("cuda", 0)


@pytest.fixture
def times(monkeypatch):
    """Pretend there is a GPU on which each question takes so many microseconds; a question without a time fails."""
    asked: dict[str, float] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timed_costs, "device_model", lambda device: USUAL)
    monkeypatch.setattr(timed_costs, "can_measure", lambda device, needed: True)

    def measured(question, device, prepare):
        found = [time for part, time in asked.items() if part in question]
        return found[0] * 1e-6 if found else None

    monkeypatch.setattr(timed_costs, "measured", measured)
    return asked


def two_products_or_one(model):
    apart = 2 * model.gemm(64, 32, 16, torch.bfloat16)
    return apart, model.gemm(64, 64, 16, torch.bfloat16) + model.copy(1024)


def test_products_and_copies_are_timed_and_launches_modelled(times):
    times.update({"[64, 16][16, 1] [16, 32][1, 16]": 3.0, "[64, 16][16, 1] [16, 64][1, 16]": 4.0, "copy of 512 bytes": 2.0})
    before, after = timed_costs.timed(GPU, two_products_or_one)
    launch = USUAL.launch * 1e6
    assert (before * 1e6, after * 1e6) == pytest.approx((2 * (launch + 3), 2 * launch + 6))


def test_nothing_is_timed_by_halves(times):
    times.update({"[16, 32]": 3.0, "[16, 64]": 4.0})  # and the copy cannot be timed
    assert timed_costs.timed(GPU, two_products_or_one) is None


def test_costs_that_the_model_cannot_tell_apart_are_timed(times):
    times.update({"[16, 32]": 3.0, "[16, 64]": 40.0, "copy": 2.0})
    by_model = timed_costs.decision(GPU, two_products_or_one, "off")
    assert by_model.pays is False and not by_model.measured
    assert timed_costs.decision(GPU, two_products_or_one, "unsure").measured
    assert not timed_costs.decision(GPU, two_products_or_one, "unsure", sure=True).measured
    assert not timed_costs.decision(GPU, lambda model: (1.0, model.copy(2)), "unsure").measured
    assert timed_costs.decision(GPU, lambda model: (1.0, model.copy(2)), "all").measured


def test_a_product_is_timed_at_its_strides_and_with_what_is_added_to_it(times):
    x, w, b = torch.empty(8, 6).t(), torch.empty(4, 3, 8), torch.empty(5)
    times["product [6, 8][1, 6] [4, 8, 3][24, 1, 8] torch.float32"] = 7.0
    model = timed_costs.TimedModel(**asdict(USUAL), device=GPU)
    assert model.product(x, w.mT) == pytest.approx(USUAL.launch + 7e-6)
    times["product [6, 8][1, 6] [8, 5][5, 1] plus [5][1] torch.float32"] = 9.0
    assert model.addmm(b, x, torch.empty(8, 5)) == pytest.approx(USUAL.launch + 9e-6)


def test_on_a_cpu_products_and_copies_are_not_timed_one_by_one():
    assert timed_costs.timed(torch.device("cpu"), two_products_or_one) is None


@pytest.mark.parametrize("x", [
    torch.empty(3, 1, 4).expand(3, 5, 4), torch.empty(()).expand(2, 3), torch.empty(6, 8)[::2, 1::3].t(), torch.empty(0, 4),
])  # fmt: skip
def test_operands_that_are_timed_have_the_strides_of_the_program(x):
    got = Layout.of(x).random(torch.float32, torch.device("cpu"))
    assert (got.shape, got.stride()) == (x.shape, x.stride()) and got.isfinite().all()
