"""Inputs that once broke a reader, or showed something new.

``faults/hostile.py --keep`` adds to them.
"""

from __future__ import annotations

import random

import pytest

from faults import mutate
from faults.hostile import corpus
from faults.readers import READERS


@pytest.mark.parametrize("name", READERS)
def test_kept_inputs_are_read_and_good_input_reads_as_before(name: str) -> None:
    kept = corpus(name)
    assert kept, "no input is kept"
    with READERS[name]() as reader:
        expected = reader.good()
        for file, data in kept:
            print(file)  # shown where it fails
            reader.read(data, random.Random(file))
        assert reader.good() == expected


@pytest.mark.parametrize("name", READERS)
def test_a_seed_gives_the_same_inputs(name: str) -> None:
    with READERS[name]() as reader:
        seeds = list(reader.seeds())
        made = [
            [mutate.mutated(rng.choice(seeds), seeds, reader.mutations, rng) for _ in range(20)]
            for rng in (random.Random(4), random.Random(4))
        ]
    assert made[0] == made[1]
