"""After a red run of the suite: were it one or two tests that fail only beside thousands of others on a busy machine?

Each of them must then pass alone, three times of three, and is named as unsteady: a defect to be mended, in the test or in
what it tests. More than two, or a run that did not come to its end, stay red.

second_look.py RESULT        RESULT: what tests/conftest.py writes where HANDRAIL_TEST_RESULT names a file
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 2
TIMES = 3
_SOME_FAILED = 1  # pytest's exit status where it ran to the end


def suspects(result: Path) -> list[str]:
    """The tests to look at again; [] where the run stays red whatever they do."""
    text = result.read_text(encoding="utf-8") if result.exists() else ""
    found = json.loads(text) if text else {}
    failed: list[str] = found.get("failed", [])
    return failed if found.get("status") == _SOME_FAILED and len(failed) <= MOST else []


def passes_alone(test: str) -> bool:
    """Three times of three."""
    return all(subprocess.run([sys.executable, "-m", "pytest", "-q", test]).returncode == 0 for _ in range(TIMES))


def main() -> int:
    """0 where all that failed pass alone."""
    tests = suspects(Path(sys.argv[1]))
    if not tests:
        return 1
    print(f"\nA second look at {len(tests)} of the tests, each alone, {TIMES} times:", *tests, sep="\n  ", flush=True)
    broken = [test for test in tests if not passes_alone(test)]
    for test in tests:
        print(f"{'BROKEN' if test in broken else 'UNSTEADY, to be mended'}: {test}", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
