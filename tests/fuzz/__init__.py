"""Random modules, sharded at random, against their unsharded selves: ``python -m tests.fuzz`` (docs/internals/fuzz.md).

cases.py    a case, plain data drawn from a seed; its features; smaller cases
parts.py    what a program is made of: blocks, comparisons
program.py  a case as a program that torchrun runs too
trial.py    runs programs on ranks, judges what they say
words.py    which refusals are known, by feature
"""
