"""Replaying compiled graphs as CUDA graphs: one launch in place of one for each kernel.

A program that waits for the host spends its time between kernels. A CUDA graph is recorded once, with the addresses of
everything that its kernels read and write, and then launched as a whole. `docs/cuda_graphs.md` says what that must not
change for the user, and this package sees to it:

    attach.py      finds the compiled graphs that can be recorded, and puts a `Program` in front of each
    handover.py    how Inductor hands such graphs over
    program.py     `Program`: what happens at each call: called, timed, recorded or replayed
    decision.py    when replaying pays, by the clock and by the memory that it takes
    recording.py   `Recording`: one CUDA graph with the memory that it reads and writes
    inputs.py      which inputs stay where they are, and which are copied
    outputs.py     how results leave: memory of their own, or memory that nobody holds any more
    device.py      what is asked of CUDA
"""
