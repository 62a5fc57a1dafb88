"""Report on the tests that failed in a run: do they pass alone?

A test that passes alone three times of three failed because of the tests or the load beside it. It is as much a defect as any
other failure, and the run stays red: this report only says where to look. With more than five failures it looks at none.

second_look.py RESULT        RESULT: what tests/conftest.py writes where HANDRAIL_TEST_RESULT names a file
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 5
TIMES = 3
_SOME_FAILED = 1  # pytest's exit status where it ran to the end


def failed(result: Path) -> list[str]:
    """Return the tests that failed; [] where the run did not end or too many failed."""
    text = result.read_text(encoding="utf-8") if result.exists() else ""
    found = json.loads(text) if text else {}
    tests: list[str] = found.get("failed", [])
    return tests if found.get("status") == _SOME_FAILED and len(tests) <= MOST else []


def passes_alone(test: str) -> bool:
    """Return whether the test passes ``TIMES`` times, each in its own run."""
    return all(subprocess.run([sys.executable, "-m", "pytest", "-q", test]).returncode == 0 for _ in range(TIMES))


def main() -> None:
    """Print a line for each test that failed."""
    tests = failed(Path(sys.argv[1]))
    if not tests:
        return
    print(f"\nA second look at {len(tests)} of the tests, each alone, {TIMES} times:", *tests, sep="\n  ", flush=True)
    verdicts = {test: passes_alone(test) for test in tests}
    for test, passed in verdicts.items():
        print(f"{'PASSES ALONE, fails beside others' if passed else 'FAILS ALONE too'}: {test}", flush=True)


if __name__ == "__main__":
    main()
