"""``handrail kv-size``: arithmetic for people, numbers for programs, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handrail_cli.main import main

CONFIGS = Path(__file__).parents[2] / "data/model_configs"
Golden = Callable[[Path | str, str], None]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["kv-size", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama-3.1-70b", ("--link-gbps", "400")),
        ("llama-3.1-70b", ("--tp", "16", "--kv-dtype", "fp8")),
        ("deepseek-v3.2", ("--tp", "8", "--link-gbps", "400")),
        ("gemma-3-27b", ("--link-gbps", "100", "--tokens", "32000")),
        ("qwen3-next-80b-a3b", ("--tokens", "8000")),
    ],
)
def test_the_page(name: str, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    code, out, err = run(capsys, str(CONFIGS / f"{name}.json"), *flags)
    assert (code, err) == (0, "")
    golden(f"cli/kv_size_{name}_{'_'.join(flag.strip('-') for flag in flags)}.txt", trimmed(out))


def test_llama_70b_comes_out_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, str(CONFIGS / "llama-3.1-70b.json"), "--tokens", "10000", "--link-gbps", "400")
    assert "80 layers × 8 KV heads × 2 × 128 × 2 B" in out
    assert "327,680" in out
    assert "3.28 GB (3,276,800,000 bytes)" in out
    assert "65.5 ms at line rate, without overhead" in out


def test_json_holds_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "jamba-v0.1.json")
    code, out, _ = run(capsys, path, "--tp", "4", "--link-gbps", "200", "--tokens", "1000", "--json")
    fields: dict[str, Any] = json.loads(out)
    assert code == 0
    assert (fields["architecture"], fields["layers"], fields["tp"], fields["block_size"]) == ("JambaForCausalLM", 32, 4, 16)
    assert (fields["token_bytes"], fields["moved_token_bytes"], fields["state_bytes"]) == (16_384, 16_384, 28 * 311_296)
    assert fields["request"] == {"tokens": 1000, "blocks": 63, "bytes": 63 * 16 * 16_384 + 28 * 311_296}
    assert fields["link"] == {"bits_per_s": 200e9, "transfer_ns": round(fields["request"]["bytes"] / 25)}
    state, attention = fields["parts"]
    assert (state["kind"], state["name"], state["rank_state_bytes"]) == ("state", "Mamba", 28 * 77_824)
    assert (attention["kind"], attention["kv_heads"], attention["rank_token_bytes"]) == ("full attention", 8, 4_096)
    assert sum(part["request_bytes"] for part in fields["parts"]) == fields["request"]["bytes"]


def test_what_was_assumed_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "model_type": "novel"}))
    _, out, _ = run(capsys, str(tmp_path))
    assert out.count("assumed: ") == 3
    assert json.loads(run(capsys, str(tmp_path), "--json")[1])["assumed"][0].startswith("dtype bfloat16")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tokens", "0"), "--tokens is 0"),
        (("--link-gbps", "-1"), "--link-gbps is -1"),
        (("--link-gbps", "nan"), "--link-gbps is nan"),
        (("--tp", "0"), "--tp is 0"),
        (("--block-size", "-4"), "--block-size is -4"),
        (("--tp", "3"), "8 KV heads do not divide among 3 ranks"),
        (("--kv-dtype", "fp7"), "did you mean fp8"),
    ],
)
def test_flags_that_make_no_sense(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "llama-3.1-70b.json")
    code, out, err = run(capsys, path, *flags)
    assert (code, out) == (2, "")
    assert message in err
    assert "valid" in err
    code, _, err = run(capsys, path, *flags, "--json")
    assert message in json.loads(err)["error"]["what"]


def test_a_hub_name_is_no_path(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "meta-llama/Llama-3.1-70B")
    assert code == 2
    assert "nothing is fetched from a hub" in err
