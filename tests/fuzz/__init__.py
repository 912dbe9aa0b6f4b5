"""Random programs through the whole backend, compared with eager in everything that a caller can see.

    python -m tests.fuzz --time 600             # look for differences, shrink them, write each as a test
    python -m tests.fuzz --seed 17              # show and judge one program

- `program.py`: a program is source text, one statement a line, so that what goes wrong can be read and cut down.
- `writer.py` and `statements/`: write a program; every statement runs eagerly as it is added, so it is valid.
- `judge.py`: runs a program eagerly and compiled, compares, and asks torch's own backends about a difference.
- `noise.py`: eager with rounding noise in every operation, to tell an unstable program from a wrong rewrite.
- `shrink.py`: the smallest program that still shows the difference.
- `campaign.py`: many seeds in several processes.
"""
