"""What the plugin must never do inside the engine, one test each.

Each test runs in a fresh interpreter, as the engine would load the plugin.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import handrail.plugin

GUEST = Path(handrail.plugin.__file__).parent
ROOT = GUEST.parents[1]
FORBIDDEN = {"asyncio", "torch", "vllm", "prometheus_client", "opentelemetry", "msgspec", "numpy", "zmq", "requests", "aiohttp"}


def in_fresh_interpreter(code: str, **env: str) -> Any:
    """Return the JSON that ``code`` prints in a fresh interpreter.

    It has only the standard library and this package.
    """
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + textwrap.dedent(code)]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nothing_but_the_standard_library_is_imported(tmp_path: Path) -> None:
    loaded = in_fresh_interpreter(
        """
        import json, pathlib, importlib
        before = set(sys.modules)
        import handrail.plugin
        for path in pathlib.Path(handrail.plugin.__file__).parent.glob("*.py"):
            importlib.import_module(f"handrail.plugin.{path.stem}")
        from handrail.plugin.plugin import register
        register()
        print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
        """,
        HANDRAIL_SOCKET=str(tmp_path / "nobody.sock"),
    )
    assert set(loaded) <= set(sys.stdlib_module_names) | {"handrail"}
    assert not set(loaded) & FORBIDDEN


@pytest.mark.parametrize("path", sorted(GUEST.glob("*.py")), ids=lambda path: path.stem)
def test_no_source_file_names_a_forbidden_module(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            top = name.split(".")[0]
            assert top not in FORBIDDEN
            assert top == "handrail" or top in sys.stdlib_module_names
            assert not name.startswith(
                ("handrail.otlp", "handrail_sidecar.export", "handrail_sidecar.proxy", "handrail_sidecar.sources")
            )


def test_without_the_variable_it_is_inert() -> None:
    found = in_fresh_interpreter(
        """
        import json, logging, threading
        from handrail.plugin import plugin
        before = (list(sys.meta_path), list(logging.getLogger("vllm").handlers), threading.active_count())
        plugin.register()
        after = (list(sys.meta_path), list(logging.getLogger("vllm").handlers), threading.active_count())
        print(json.dumps([before == after, plugin.recorder() is None]))
        """
    )
    assert found == [True, True]


def test_no_thread_and_no_socket_before_there_is_something_to_observe(tmp_path: Path) -> None:
    found = in_fresh_interpreter(
        """
        import json, logging, os, threading
        from handrail.plugin import plugin
        plugin.register()
        logging.getLogger("vllm").addHandler(logging.NullHandler())
        logging.getLogger("vllm").warning("a line at start-up")
        print(json.dumps([threading.active_count(), len(os.listdir("/proc/self/fd"))]))
        """,
        HANDRAIL_SOCKET=str(tmp_path / "nobody.sock"),
    )
    assert found == [1, 4]  # stdin, stdout, stderr, and the listing itself


def test_a_forked_child_begins_anew(tmp_path: Path) -> None:
    found = in_fresh_interpreter(
        """
        import json, os, threading
        from handrail.plugin import plugin
        plugin.register()
        recorder = plugin.recorder()
        recorder.record(("first_token", 1, "the parent's"))
        boot = recorder.boot
        read, write = os.pipe()
        if os.fork() == 0:
            os.write(write, json.dumps([recorder.boot != boot, len(recorder._events), recorder.running]).encode())
            os._exit(0)
        os.wait()
        print(os.read(read, 1000).decode())
        """,
        HANDRAIL_SOCKET=str(tmp_path / "nobody.sock"),
    )
    assert found == [True, 0, False]


def test_register_twice_sets_up_once(tmp_path: Path) -> None:
    found = in_fresh_interpreter(
        """
        import json, logging
        from handrail.plugin import plugin
        plugin.register()
        plugin.register()
        print(json.dumps([len(logging.getLogger("vllm").handlers), len(sys.meta_path)]))
        """,
        HANDRAIL_SOCKET=str(tmp_path / "nobody.sock"),
    )
    bare = in_fresh_interpreter("import json; print(json.dumps(len(sys.meta_path)))")
    assert found == [1, bare + 1]
