"""Run a real prefill/decode pair until Ctrl-C.

Run as ``python tests/vllm/serve_pair.py``. pair.py describes what it does and takes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from vllm.pair import main

if __name__ == "__main__":
    sys.exit(main())
