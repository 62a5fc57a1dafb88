"""Samples of the metrics page of a vLLM with two data-parallel engines."""

from __future__ import annotations

from builders.device_samples import COUNTING_SINCE, START_UNIX_NS, S, process
from handrail.records import EngineHistogram, EngineSample, EngineValue, Source


def engine_sample(number: int, engines: tuple[str, ...] = ("0", "1")) -> EngineSample:
    """Build the ``number``-th scrape, one every five seconds.

    Values are in the order of the schema.
    """
    return EngineSample(
        process=process("d0"),
        source=Source.METRICS,
        at_unix_ns=START_UNIX_NS + number * 5 * S,
        model="tiny",
        values=(
            *(EngineValue(name="requests_running", value=float(number + place), engine=e) for place, e in enumerate(engines)),
            *(
                EngineValue(
                    name="requests_finished", value=10.0 * number, engine=e, label=reason, start_unix_ns=COUNTING_SINCE + place
                )
                for place, e in enumerate(engines)
                for reason in ("Abort", "stop")
            ),
        ),
        histograms=tuple(
            EngineHistogram(
                name="ttft_seconds",
                bounds=(0.1, 1.0),
                counts=(number, 2, 3 * number),
                count=4 * number + 2,
                total=None if e == "1" else 0.1 * number,
                engine=e,
                start_unix_ns=COUNTING_SINCE,
            )
            for e in engines
        ),
    )
