"""What replaying guarantees, on a device that behaves as CUDA graphs do, and when it replays."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import output_code

import triptych
from tests.replay_guarantees import *  # noqa: F403
from tests.replay_guarantees import WIDTH, Net, compiled, inputs, pair, same_gradients, step
from tests.replayed import FakeDevice, replaying_on_a_cpu
from triptych.replay import decision
from triptych.replay.attach import reason_not_to
from triptych.replay.handover import compiled_graphs
from triptych.replay.outputs import Role
from triptych.replay.program import Program, all_programs


@pytest.fixture(params=["eager", "inductor"])
def codegen(request):
    return request.param


@pytest.fixture
def device(monkeypatch):
    with replaying_on_a_cpu(monkeypatch) as device:
        yield device
    torch._dynamo.reset()


def test_somebody_else_records(device, codegen):
    model = Net()
    run, x = compiled(model, codegen), inputs(1)[0]
    device.somebody_records = True
    with torch.no_grad():
        for _ in range(5):
            torch.testing.assert_close(run(x), model(x))
    assert not device.graphs


def test_memory_is_freed_with_the_program(device, codegen):
    model = Net()
    run = compiled(model, codegen)
    for x in inputs(6):
        run(x).sum().backward()
    parameter = weakref.ref(model.first.weight)
    del run, model, x
    torch._dynamo.reset()
    device.graphs.clear()
    gc.collect()
    assert parameter() is None


def test_a_hook_frees_what_the_forward_saved(device, codegen):
    """As hooks do that move saved tensors elsewhere until the backward."""
    model, want = pair()
    run = compiled(model, codegen)

    def pack(x):
        if isinstance(x, torch.nn.Parameter) or x._is_view():
            return x
        moved = x.clone()
        x.untyped_storage().resize_(0)
        return moved

    for x in inputs(8):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            y = run(x.clone())
        y.sum().backward()
        want(x).sum().backward()
        same_gradients(model, want)


def test_a_gradient_whose_memory_is_freed(device, codegen):
    model, want = pair()
    run = compiled(model, codegen)
    for x in inputs(8):
        step(run, x)
        step(want, x)
        same_gradients(model, want)
        for p in model.parameters():
            p.grad.untyped_storage().resize_(0)
        model.zero_grad()
        want.zero_grad()


def test_arrays_over_gradients_and_results(device, codegen):
    model, want = pair()
    run, held = compiled(model, codegen), []
    for x in inputs(8):
        y = run(x)
        y.square().mean().backward()
        step(want, x)
        held += [(p.grad.numpy(), q.grad) for p, q in zip(model.parameters(), want.parameters())]
        held.append((y.detach().numpy(), want(x).detach()))
        model.zero_grad()
        want.zero_grad()
    for mine, theirs in held:
        torch.testing.assert_close(torch.from_numpy(mine), theirs)


def test_threads_train_one_model(device, codegen):
    model, want = pair()
    run, wrong = compiled(model, codegen), []
    step(run, inputs(1)[0])

    def train(k):
        try:
            for n in range(10):
                x = torch.full((4, WIDTH), (k + n) / 10)
                losses = [call(x).square().mean() for call in (run, want)]
                mine = torch.autograd.grad(losses[0], [*model.parameters()])
                torch.testing.assert_close(mine, torch.autograd.grad(losses[1], [*want.parameters()]))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=train, args=(k,)) for k in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not wrong and not any(one.is_alive() for one in threads)


def asked_for(run, roles, device, **facts):
    return Program(run, roles, device, policy=decision.Policy(always=True), **facts)


def test_one_thread_records_at_a_time():
    device, began, end = FakeDevice(), threading.Event(), threading.Event()
    record = device.record

    def slowly(work):
        began.set()
        assert end.wait(60)
        return record(work)

    device.record = slowly
    first, second = (asked_for(lambda given: (given[0] * 2,), [Role.OWN], device) for _ in range(2))
    for program in (first, second):
        program([torch.ones(4)])  # warm
    thread = threading.Thread(target=lambda: first([torch.ones(4)]))
    thread.start()
    assert began.wait(60)
    assert torch.equal(second([torch.ones(4)])[0], torch.full((4,), 2.0)) and not device.graphs
    end.set()
    thread.join(60)
    assert len(device.graphs) == 1
    second([torch.ones(4)])
    assert len(device.graphs) == 2


def test_threads_that_compile_do_not_hand_over_each_others_graphs(monkeypatch):
    finished, ours = [], [threading.Event(), threading.Event()]
    monkeypatch.setattr(output_code, "maybe_realign_inputs", lambda *given: None)
    monkeypatch.setattr(output_code, "cudagraph_post_compile", lambda *given: finished.append("by torch"))
    before = dict(vars(output_code))

    class Graph:
        inputs_to_check = mutated_input_idxs = ()

    def other():
        with compiled_graphs(lambda compiled: None, lambda compiled: finished.append("by the other"), True):
            ours[0].set()
            assert ours[1].wait(60)
            output_code.cudagraph_post_compile([], Graph())

    thread = threading.Thread(target=other)
    with compiled_graphs(lambda compiled: None, lambda compiled: finished.append("by this one"), True):
        thread.start()
        assert ours[0].wait(60)
        output_code.cudagraph_post_compile([], Graph())
    output_code.cudagraph_post_compile([], Graph())
    ours[1].set()
    thread.join(60)
    assert finished == ["by this one", "by torch", "by the other"]
    assert vars(output_code) == before


def test_a_finalizer_calls_the_program_that_is_called():
    """Between the check that nobody holds what it wrote and the replay."""
    device, held, calls = FakeDevice(), [], []
    program = asked_for(lambda given: (given[0] * 2,), [Role.KEPT], device)

    def stream():
        if calls.pop():
            held.append(program([torch.full((4,), 7.0)])[0])
        return 0

    device.stream = stream
    for n in range(6):
        calls[:] = [False, n == 4]
        (y,) = program([torch.full((4,), float(n))])
        assert torch.equal(y, torch.full((4,), 2.0 * n))
        del y
    assert torch.equal(held[0], torch.full((4,), 14.0))


def test_a_program_whose_inputs_always_move_is_not_recorded_for_ever():
    device, parameters = FakeDevice(), []
    program = asked_for(lambda given: (given[0] * 2,), [Role.OWN], device, fixed={0})
    for n in range(400):
        parameters.append(torch.full((4,), float(n)))
        assert torch.equal(program([parameters[-1]])[0], 2 * parameters[-1])
    assert len(device.graphs) <= 64 and program.verdict() == "not replayed: its inputs move from call to call"
    assert not any(sizes.recordings for sizes in program.by_sizes.values())


def test_a_part_returns_an_input_that_a_later_part_writes():
    """Inductor does so with each input that later parts of a graph need."""

    def read(given):
        (x,) = given
        given.clear()
        return x, x * 2

    def write(given):
        x, y = given
        given.clear()
        return (x.add_(y),)

    device = FakeDevice()
    first = asked_for(read, [Role.KEPT, Role.KEPT], device, written={0})
    second = asked_for(write, [Role.KEPT], device, written={0})
    for n in range(8):
        x = torch.full((4,), float(n))
        second([*first([x])])
        assert torch.equal(x, torch.full((4,), 3.0 * n))
    assert device.replays >= 8


def test_random_numbers_are_those_without_replays(device):
    def program(x):
        return F.dropout(x, 0.5)

    run, x = compiled(program, "eager"), torch.ones(64)
    for seed in range(6):
        torch.manual_seed(seed)
        mine = [run(x), run(x)]
        torch.manual_seed(seed)
        assert torch.equal(torch.stack(mine), torch.stack([program(x), program(x)]))


def test_a_mode_that_watches_calls_sees_them(device):
    from torch.utils.flop_counter import FlopCounterMode

    model = Net()
    run, x = compiled(model, "eager"), inputs(1)[0]
    with torch.no_grad():
        for _ in range(5):
            run(x)
        with FlopCounterMode(display=False) as counted:
            run(x)
    assert counted.get_total_flops() == 2 * 2 * 4 * WIDTH * 2 * WIDTH


class Times:
    """What the clocks say of a program: seconds of the host for a call and a replay, and those of the device."""

    def __init__(self, monkeypatch, device, host=1e-3, gpu=1e-3, replay_host=1e-4, replay_gpu=5e-4):
        self.now, self.device = 0.0, device
        self.each = {"call": (host, gpu), "replay": (replay_host, replay_gpu)}
        monkeypatch.setattr(decision.time, "perf_counter", lambda: self.now)

    def spend(self, kind):
        host, gpu = self.each[kind]
        self.now += host
        self.device.seconds.append(gpu)


def decided(monkeypatch, calls=12, policy=decision.BY_THE_CLOCK, in_use=2**30, idle_memory=0, **seconds):
    """The verdict on a program by these clocks, after some calls."""
    device = FakeDevice()
    device.in_use, device.idle_memory = in_use, idle_memory
    times = Times(monkeypatch, device, **seconds)

    def run(given):
        (x,) = given
        given.clear()
        times.spend("call")
        return (x * 2,)

    def record(work):
        graph, results = FakeDevice.record(device, work)
        replay = graph.replay

        def spent():
            replay()
            device.seconds.pop()  # of the call by which the fake replays
            times.now -= times.each["call"][0]
            times.spend("replay")

        graph.replay = spent
        times.now -= times.each["call"][0]
        device.seconds.clear()
        return graph, results

    device.record = record
    program = Program(run, [Role.OWN], device, policy=policy)
    for n in range(calls):
        x = torch.full((4,), float(n))
        (y,) = program([x])
        assert torch.equal(y, 2 * x)
    return program.verdict(), device


def test_a_program_that_waits_for_the_host_is_replayed(monkeypatch):
    text, device = decided(monkeypatch)
    assert text.startswith("replayed: 500 us instead of 1.00 ms") and device.replays >= 6


@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_a_program_that_is_called_a_few_times_is_never_recorded(monkeypatch, calls):
    text, device = decided(monkeypatch, calls=calls)
    assert text == "not replayed: called too few times" and not device.graphs


def test_a_program_that_keeps_the_device_busy_is_never_recorded(monkeypatch):
    text, device = decided(monkeypatch, gpu=1.0)
    assert "does not wait for the host: 1000.00 ms on the GPU, 1.00 ms on the host" in text and not device.graphs


def test_a_replay_that_is_no_faster_is_dropped(monkeypatch):
    text, device = decided(monkeypatch, replay_gpu=0.99e-3)
    assert text == "not replayed: a replay takes 990 us, a call 1.00 ms"
    assert device.replays == 3


@pytest.mark.parametrize("part, kept", [(0.05, True), (0.2, False)])
def test_memory_decides(monkeypatch, part, kept):
    peak = 2**30
    text, _ = decided(monkeypatch, in_use=peak, idle_memory=int(part * peak))
    assert text.startswith("replayed") == kept
    text, _ = decided(monkeypatch, policy=decision.Policy(memory=0.3), in_use=peak, idle_memory=int(part * peak))
    assert text.startswith("replayed")


def test_asked_for_neither_clock_nor_memory_decide(monkeypatch):
    text, device = decided(monkeypatch, calls=3, policy=decision.Policy(always=True), gpu=1.0, idle_memory=2**33)
    assert text.startswith("replayed") and device.replays == 2


def test_an_operator_that_may_wait_is_named_with_its_line():
    @torch.library.custom_op("test_replay::waits", mutates_args=())
    def waits(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    graph = torch.fx.symbolic_trace(lambda x: torch.ops.test_replay.waits.default(x) + 1)
    assert "test_replay.waits.default, which may wait" in reason_not_to(graph, triptych.Options())
    assert not reason_not_to(graph, triptych.Options(cuda_graphs="on"))
    assert not reason_not_to(torch.fx.symbolic_trace(lambda x: torch.ops.aten.sin.default(x)), triptych.Options())


@pytest.mark.parametrize(
    "options, mode, replays",
    [
        ({}, None, "auto"),
        ({"cuda_graphs": "off"}, None, "off"),
        ({}, "reduce-overhead", "on"),
        ({"cuda_graphs": "off"}, "reduce-overhead", "off"),
        ({}, "max-autotune-no-cudagraphs", "off"),
        ({"codegen": "eager"}, "reduce-overhead", "off"),
        ({"inductor.triton.cudagraphs": True}, None, "on"),
        ({"inductor.triton.cudagraphs": False}, "reduce-overhead", "off"),
    ],
)
def test_what_is_asked_for(options, mode, replays):
    assert triptych.Options.make(options, mode).replays == replays


def test_what_is_replaced_in_inductor_is_there():
    from triptych import _private

    for name in ("maybe_realign_inputs", "cudagraph_post_compile", "cudagraph_partition_post_compile"):
        assert inspect.isfunction(getattr(_private.output_code, name)), name
    compiled = inspect.getsource(_private.output_code.CompiledFxGraph.post_compile)
    assert compiled.count("maybe_realign_inputs(") == 1


def test_a_backward_reads_weights_in_place_where_the_forward_saves_views_of_them(device):
    """Views of parameters are new tensors at each call, over memory that stays."""
    model = Net()
    run = compiled(model, "eager")
    for x in inputs(8):
        run(x).sum().backward()
        model.zero_grad()
    (backward,) = [one for one in all_programs() if one.name == "backward" and one.by_sizes]
    ((recording,),) = [sizes.recordings for sizes in backward.by_sizes.values()]
    weights = {p.data_ptr() for p in model.parameters()}
    read = {address for i, address in enumerate(recording.inputs.addresses) if i in recording.inputs.fixed}
    assert read & weights and len(recording.inputs.copied) == 1  # the gradient of the result
