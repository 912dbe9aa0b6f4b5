"""The clock: which answers are stored, which count for this process only, and where the model decides after all."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

import pytest
import torch

from triptych.cost import UNKNOWN, Moved, Part, Product, Work, answers, clock, timing
from triptych.cost.decision import choose
from triptych.cost.device import KNOWN, USUAL
from triptych.cost.store import read_store, store_path

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@dataclass(frozen=True)
class Task(Part):
    """Work of which the model says one second per unit."""

    name: str
    units: float = 1e-5
    error: float = UNKNOWN
    ran = None

    def seconds(self, model):
        return self.units

    def prepare(self, device):
        return lambda: None


def form(name, device=CPU, **how):
    return Work.of(device, Task(name, **how))


@pytest.fixture
def rounds(monkeypatch, tmp_path):
    """The rounds that the next measurements give, in microseconds by candidate; an empty store, and nothing known."""
    given: list[list[list[float]]] = []

    def measured(runs):
        return [[time * 1e-6 for time in of_one] for of_one in given.pop(0)]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "_known", {})
    monkeypatch.setattr(clock, "HOST_BYTES", 1 << 30)
    monkeypatch.setattr(clock, "rounds_in_turns", measured)
    return given


def steady(*times):
    return [[time] * 5 for time in times]


def asked(old="old", new="new", tune="unsure", **how):
    return choose(form(old, **how), form(new, **how), tune)


def test_an_answer_is_stored_with_its_spread(rounds):
    rounds.append([[8.4, 8.0, 30.0, 8.2], [5.0, 5.0, 5.0, 9.0]])
    decision = asked()
    assert decision.measured and decision.pays
    assert (decision.before, decision.after) == pytest.approx((8e-6, 5e-6))
    assert decision.spread == pytest.approx(0.05)
    ((key, times),) = read_store(clock.MEASUREMENTS).items()
    assert "Task(name=old" in key and times == [[pytest.approx(8e-6), 0.05], [pytest.approx(5e-6), 0.0]]


def test_a_question_is_asked_once(rounds):
    rounds.append(steady(8, 5))
    first = asked()
    assert asked() == first  # from memory
    clock.forget()
    assert (asked().before, asked().after) == (first.before, first.after)  # from disk
    assert not rounds


def test_rounds_that_scatter_are_repeated_until_they_agree(rounds):
    rounds += [[[10, 14, 20], [5, 5, 5]], [[10, 10.5, 30], [5, 5, 5]]]
    decision = asked()
    assert decision.measured and decision.spread == pytest.approx(0.05) and not rounds
    assert read_store(clock.MEASUREMENTS)


def test_noise_is_no_answer_and_the_model_decides_in_the_whole_process(rounds):
    """Other decisions of the same program in one process would be a riddle."""
    rounds += [[[10 * 2**i, 90 * 3**i, 900 * 3**i], [5, 5, 5]] for i in range(clock.ATTEMPTS)]
    rounds.append(steady(8, 5))
    first = asked()
    assert not first.measured and asked() == first
    assert len(rounds) == 1 and not read_store(clock.MEASUREMENTS)
    clock.forget()  # another process, on a machine that is idle again
    assert asked().measured


def test_what_is_far_from_the_model_counts_for_this_process_only(rounds):
    rounds += [steady(2000, 1000)] * clock.ATTEMPTS
    first = asked()
    assert first.measured and first.after == pytest.approx(1e-3)
    assert asked() == first and not rounds
    assert not read_store(clock.MEASUREMENTS)


def test_a_number_of_rows_is_answered_by_the_next_power_of_two_on_a_cpu_too(rounds):
    rounds.append(steady(8, 5))
    forms = [[Work.of(CPU, Product.sized(rows, n, 64, torch.float32, error=UNKNOWN)) for n in (32, 48)] for rows in (1000, 1024)]
    smaller, full = (choose(*pair, "unsure") for pair in forms)
    assert (full.before, full.after) == pytest.approx((8e-6, 5e-6)) and not rounds
    assert smaller.measured and smaller.after == pytest.approx(5e-6 * 1000 / 1024, rel=0.2) and smaller.after < full.after


def test_too_few_rounds_say_nothing(rounds):
    rounds += [[[8.0], [5.0]], [[8.0], [5.0]], [[8.0], [5.0]]]
    assert asked().measured, "three attempts with a round each have three rounds"
    assert clock.agreed([1.0, 1.0]).spread == float("inf")


def test_work_that_fails_is_not_timed(rounds, monkeypatch):
    def fails(self, device):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Task, "prepare", fails)
    assert not asked().measured and not read_store(clock.MEASUREMENTS)


@pytest.mark.parametrize(
    "tune, units, is_timed",
    [("off", 8e-6, False), ("unsure", 8e-6, True), ("all", 8e-6, True), ("off", 2e-6, False), ("unsure", 2e-6, False), ("all", 2e-6, True)],
)  # fmt: skip
def test_when_the_clock_is_asked(rounds, tune, units, is_timed):
    """Where the two forms are closer than the model can tell, or always, or never."""
    rounds.append(steady(3, 9))
    old, new = (Work.of(CPU, Task(name, time, error=1.5)) for name, time in (("old", 10e-6), ("new", units)))
    decision = choose(old, new, tune)
    assert decision.measured == is_timed and decision.pays != is_timed  # timed, it loses


def test_who_forbids_it_is_not_asked(rounds, monkeypatch):
    old = Work.of(CPU, Task("old"), by_clock=False)
    assert not choose(old, form("new"), "all").measured
    assert not choose(Work.of(CPU, Task("old"), on_every_rank=True), form("new"), "all").measured
    torch.use_deterministic_algorithms(True)
    try:
        assert not asked().measured
    finally:
        torch.use_deterministic_algorithms(False)


def test_long_work_is_not_timed_on_a_cpu(rounds):
    assert not asked(units=1.0).measured


def test_times_without_onednn_are_not_those_with_it(rounds):
    rounds += [steady(8, 5), steady(4, 9)]
    assert asked().pays
    with torch.backends.mkldnn.flags(enabled=False):
        assert not asked().pays


def test_a_process_goes_on_using_what_it_has_measured(rounds):
    rounds += [steady(8, 5), steady(8, 9), steady(1, 2)]
    assert asked().pays
    in_this_process = dict(clock._known)
    clock.forget()
    store_path(clock.MEASUREMENTS).unlink()
    assert not asked().pays  # as another process, which measured at the same time, would store it
    clock.forget()
    clock._known.update(in_this_process)
    asked("another")  # reads the store
    assert asked().pays


def test_forms_of_different_moments_are_not_compared(rounds):
    """On a CPU a form is timed again, beside each other form that it is compared with."""
    rounds += [steady(8, 5), steady(4, 9)]
    assert asked(new="one way").before == pytest.approx(8e-6)
    assert asked(new="another way").before == pytest.approx(4e-6)


@pytest.mark.parametrize("entry", ["[[NaN, 0]]", "[[-1, 0]]", "[[1, 5]]", "[[true, 0]]", '"fast"', "null", "[]", "[[1]]", "[1.5]"])
def test_what_cannot_be_a_time_is_measured_again(rounds, entry):
    path = store_path(clock.MEASUREMENTS)
    path.parent.mkdir(parents=True)
    path.write_text(f'{{"a": {entry}, "b": [[0.5, 0.01]]}}')
    assert clock.stored_answers() == {"b": (clock.Clocked(0.5, 0.01),)}


def test_questions_are_counted(rounds, monkeypatch):
    monkeypatch.setattr(clock, "questions", clock._Questions())
    rounds.append(steady(8, 5))
    asked(), asked()
    assert (clock.questions.asked, clock.questions.answered) == (2, 1)


def test_candidates_take_turns_on_a_cpu(monkeypatch):
    ran = []
    monkeypatch.setattr(timing, "_on_cpu", lambda run, times: ran.append((run.name, times)) or run.seconds)

    class Run:
        def __init__(self, name, seconds):
            self.name, self.seconds = name, seconds

        def __call__(self):
            ran.append(self.name)

    runs = [Run("a", 1e-4), Run("b", 2e-4)]
    assert timing.rounds_in_turns(runs, rounds=3) == [[1e-4] * 3, [2e-4] * 3]
    assert ran == ["a", "b", ("a", 1), ("b", 1)] + [("a", 5), ("b", 2)] * 3
    assert [len(r) for r in timing.rounds_in_turns(runs, most=2e-4)] == [2, 2], "too long for more"


# ---- part by part on a GPU ----


@pytest.fixture
def gpu(rounds, monkeypatch):
    """Pretend there is a GPU on which each question takes so many microseconds; a question without a time fails."""
    times: dict[str, float] = {}

    def on_gpu(part, device):
        found = [time for text, time in times.items() if text in part.question(device)]
        return [[found[0] * 1e-6] * 5] if found else None

    monkeypatch.setattr(clock, "_rounds_on_gpu", on_gpu)
    monkeypatch.setattr(clock, "apart_from_the_program", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(clock, "device_name", lambda device: "some GPU")
    return times


def test_parts_are_timed_and_launches_modelled(gpu):
    gpu.update({"[16, 32]": 3.0, "[16, 64]": 4.0, "Moved": 2.0})
    old = 2 * Work.of(GPU, Product.sized(64, 32, 16, torch.bfloat16))
    new = Work.of(GPU, Product.sized(64, 64, 16, torch.bfloat16), Moved(1024))
    decision = choose(old, new, "all")
    launch = USUAL.launch
    assert decision.measured
    assert (decision.before, decision.after) == pytest.approx((2 * (launch + 3e-6), 2 * launch + 6e-6))


def test_nothing_is_timed_by_halves(gpu):
    gpu.update({"[16, 32]": 3.0})  # and the copy cannot be timed
    old, new = (Work.of(GPU, Product.sized(64, 32, 16, torch.bfloat16), extra) for extra in ((), Moved(1024)))
    assert not choose(old, new, "all").measured


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_of_a_gpu_that_is_not_there_the_model_decides():
    old, new = (Work.of(GPU, Product.sized(64, 32, 16, torch.bfloat16), extra) for extra in ((), Moved(1024)))
    assert choose(old, new, "all") == choose(old, new, "off")


def test_traffic_in_another_kernel_is_modelled(gpu):
    gpu.update({"[16, 32]": 3.0})
    work = Work.of(GPU, Product.sized(64, 32, 16, torch.bfloat16), Moved(4.8e6, launches=0))
    decision = choose(work, work, "all")
    assert decision.after == pytest.approx(USUAL.launch + 3e-6 + 4.8e6 / USUAL.bandwidth)


def test_on_a_cpu_traffic_in_another_kernel_is_modelled_too(rounds):
    rounds.append(steady(30.0, 20.0))
    old, new = (form(name) + Moved(1e6, launches=0) for name in ("old", "new"))
    before, after = clock.clocked(old, new)
    more = Work.of(CPU, Moved(1e6, launches=0)).seconds()
    assert (before.seconds, after.seconds) == pytest.approx((30e-6 + more, 20e-6 + more))
    assert clock.clocked(old, Work.of(CPU, Moved(1e6, launches=0))) is None, "nothing of it can be timed"


def test_a_number_of_rows_is_answered_by_the_next_power_of_two(gpu):
    """In proportion to the modelled times."""
    gpu.update({"bf16[1024, 512]": 10.0})
    part, full = (Product.sized(rows, 4096, 512, torch.bfloat16) for rows in (1000, 1024))
    answer = clock.part_on_gpu(part, GPU, USUAL)
    assert answer.seconds == pytest.approx(10e-6 * part.seconds(USUAL) / full.seconds(USUAL))
    assert len(clock._known) == 1 and clock.part_on_gpu(full, GPU, USUAL).seconds == pytest.approx(10e-6)
    assert len(clock._known) == 1


def test_known_devices_bring_their_answers(gpu, monkeypatch, tmp_path):
    part = Moved(1 << 20)
    (tmp_path / "H200.json").write_text(json.dumps({"device": "NVIDIA H200", "answers": {part.question(GPU): 2e-6}}))
    monkeypatch.setattr(answers, "FOLDER", tmp_path)
    answers._answers.cache_clear()
    h100 = next(model for model in KNOWN if model.name == "H100")
    try:
        monkeypatch.setattr(clock, "device_name", lambda device: "NVIDIA H200")
        assert clock.part_on_gpu(part, GPU, USUAL).seconds == 2e-6
        monkeypatch.setattr(clock, "device_name", lambda device: "NVIDIA H100 80GB HBM3")  # the same cores
        expected = 2e-6 * part.seconds(h100) / part.seconds(USUAL)
        assert clock.part_on_gpu(part, GPU, USUAL).seconds == pytest.approx(expected)
        monkeypatch.setattr(clock, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
        assert clock.part_on_gpu(part, GPU, USUAL) is None
    finally:
        answers._answers.cache_clear()


def test_answers_that_are_brought_are_of_known_devices():
    for path in answers.FOLDER.glob("*.json"):
        content = json.loads(path.read_text())
        assert answers.model_named(content["device"]).name == path.stem
        assert all(0 < seconds < 1 for seconds in content["answers"].values())
