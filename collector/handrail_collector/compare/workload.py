"""Check whether two arms got the same work.

Where they did not, a difference between them is no evidence about their layout.

Prompt and answer lengths are compared by the Kolmogorov-Smirnov distance.
It is the largest difference between the shares of requests that are at most that long.
Two arms are alike while the distance stays within ``UNLIKE`` and what chance alone gives at 1 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Final

import numpy as np

from handrail_collector.compare.sample import Floats, Sample

UNLIKE: Final = 0.1
_CHANCE: Final = 1.63  # Kolmogorov's constant at 1 %
_MOSTLY: Final = 0.9  # least share of requests with a figure before it is compared


def unlike(of: Sample, to: Sample) -> tuple[str, ...]:
    """Return why the two workloads are not comparable, in words.

    Empty where no evidence shows that they differ.
    """
    return tuple(_unlike(of, to))


def unknown(sample: Sample) -> tuple[str, ...]:
    """Return what cannot be compared because the rows do not hold it."""
    lengths = {"prompt": sample.prompt_tokens, "answer": sample.output_tokens}
    return tuple(f"the {name} lengths of most requests are unknown" for name, values in lengths.items() if not _known(values))


def cached_share(sample: Sample) -> float | None:
    """Return the share of prompt tokens that came from a prefix cache.

    Only requests that hold the figure count.
    """
    both = ~np.isnan(sample.cached_tokens) & (sample.prompt_tokens > 0)
    if both.sum() < _MOSTLY * len(sample) or not both.any():
        return None
    return float(sample.cached_tokens[both].sum() / sample.prompt_tokens[both].sum())


def _unlike(of: Sample, to: Sample) -> Iterator[str]:
    models = [_main(sample) for sample in (of, to)]
    if None not in models and models[0] != models[1]:
        yield f"other models: {models[0]} and {models[1]}"
    ended = [~(sample.failed | sample.left | sample.refused) for sample in (of, to)]
    for name, a, b in (
        ("prompt", of.prompt_tokens, to.prompt_tokens),
        ("answer", of.output_tokens[ended[0]], to.output_tokens[ended[1]]),
    ):
        if _known(a) and _known(b):
            a, b = a[~np.isnan(a)], b[~np.isnan(b)]
            far = distance(a, b)
            if far > UNLIKE + _CHANCE * sqrt(1 / len(a) + 1 / len(b)):
                yield f"other {name} lengths: mean {a.mean():,.0f} and {b.mean():,.0f} tokens, the distributions {far:.0%} apart"
    caches = [cached_share(sample) for sample in (of, to)]
    if caches[0] is not None and caches[1] is not None and abs(caches[0] - caches[1]) > UNLIKE:
        yield f"other shares of the prompts came from a prefix cache: {caches[0]:.0%} and {caches[1]:.0%}"


def distance(a: Floats, b: Floats) -> float:
    """Return the Kolmogorov-Smirnov distance of two samples, 0 to 1."""
    both = np.concatenate((a, b))
    below = [np.searchsorted(np.sort(each), both, side="right") / len(each) for each in (a, b)]
    return float(np.abs(below[0] - below[1]).max())


def _known(values: Floats) -> bool:
    return len(values) > 0 and bool((~np.isnan(values)).mean() >= _MOSTLY)


def _main(sample: Sample) -> str | None:
    return next(iter(sample.models), None)
