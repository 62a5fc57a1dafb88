"""Compute the share of transfer time that an engine spends on posting.

Posting hands a transfer to the transport. The source is the engine's metrics (case B05). Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from handrail.records import EngineHistogram, EngineSample
from handrail_collector.links.facts import Posts

_TRANSFER: Final = "kv_transfer_seconds"
_POST: Final = "kv_post_seconds"
_DESCRIPTORS: Final = "kv_transfer_descriptors"
_BYTES: Final = "kv_transfer_bytes"
POST_NAMES: Final = frozenset({_TRANSFER, _POST, _DESCRIPTORS, _BYTES})
"""Sampled quantities, by their names in ``handrail.records.quantities``."""


def posts_of(samples: Iterable[EngineSample]) -> list[Posts]:
    """Compute the growth of each instance's histograms, first sample to last.

    After a counter reset, the growth counts from the reset.
    """
    by_instance: dict[str, list[EngineSample]] = defaultdict(list)
    for sample in samples:
        by_instance[sample.process.instance].append(sample)
    found = []
    for instance, engine_samples in by_instance.items():
        engine_samples.sort(key=lambda sample: sample.at_unix_ns)
        grown = {name: _grown(engine_samples[0], engine_samples[-1], name) for name in POST_NAMES}
        (transfers, seconds), (posted, post_seconds) = grown[_TRANSFER], grown[_POST]
        if transfers > 0 and posted > 0:
            found.append(
                Posts(
                    instance=instance,
                    transfers=transfers,
                    transfer_ns=round(seconds / transfers * 1e9),
                    post_ns=round(post_seconds / posted * 1e9),
                    descriptors=_mean(*grown[_DESCRIPTORS]),
                    bytes=_mean(*grown[_BYTES]),
                )
            )
    return found


def _grown(first: EngineSample, last: EngineSample, name: str) -> tuple[int, float]:
    """Return by how many values and by what sum the histograms of a name grew.

    The figures are summed over engines and transports.
    """
    if last is first:
        return 0, 0.0
    before = {_key(each): each for each in first.histograms if each.name == name}
    count, total = 0, 0.0
    for each in last.histograms:
        if each.name != name or each.total is None:
            continue
        old = before.get(_key(each))
        old_count, old_total = (old.count, old.total) if old is not None and old.total is not None else (0, 0.0)
        if old_count > each.count:  # the counter was reset, and no sample shows when
            old_count, old_total = 0, 0.0
        count += each.count - old_count
        total += max(0.0, each.total - old_total)
    return count, total


def _key(histogram: EngineHistogram) -> tuple[str, str, int]:
    return histogram.engine, histogram.label, histogram.start_unix_ns


def _mean(count: int, total: float) -> int | None:
    return round(total / count) if count > 0 else None
