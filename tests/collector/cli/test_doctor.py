"""``handrail doctor``: the articles' two pairs, its exit codes and its refusals."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doubles.doctor import FakeNvml, h100, l40s, pair_yaml
from handrail_cli.commands import doctor
from handrail_cli.main import Parser, main
from handrail_doctor.prediction import HOST_STAGED_BYTES_PER_S
from handrail_sim.emulator.scenario import Scenario, load

CONFIGS = Path(__file__).parents[2] / "data/model_configs"
Golden = Callable[[Path | str, str], None]
L40S_FLAGS = ("--placement", "same-host", "--on", "both", "--tokens", "8192", "--ttft", "1s")
H100_FLAGS = ("--placement", "across-hosts", "--on", "decode", "--tokens", "10000", "--ttft", "2s")


def parsed(*flags: str) -> Namespace:
    parser = Parser(prog="handrail doctor")
    doctor.add_arguments(parser)
    return parser.parse_args(flags)


@pytest.fixture
def l40s_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeNvml, tuple[str, ...]]:
    """Return the emulated L40S pair as its readers would find it.

    Scenario l40s-split, Qwen2.5-7B.
    """
    monkeypatch.delenv("HANDRAIL_API", raising=False)
    monkeypatch.chdir(tmp_path)
    nvml = l40s(tmp_path)
    env = {"UCX_NET_DEVICES": "all", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}
    text = pair_yaml(
        prefill_env={"CUDA_VISIBLE_DEVICES": "0", **env},
        decode_env={"CUDA_VISIBLE_DEVICES": "1", **env, "VLLM_NIXL_SIDE_CHANNEL_PORT": "5601"},
    )
    Path("pair.yaml").write_text(text)
    flags = ("--config", "pair.yaml", "--model", str(CONFIGS / "qwen2.5-7b.json"), "--root", str(tmp_path), *L40S_FLAGS)
    return nvml, flags


@pytest.fixture
def h100_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeNvml, tuple[str, ...]]:
    """Return the emulated H100 pair over RDMA.

    Scenario h100-70b-split, Llama 3.1 70B on eight GPUs each.
    """
    monkeypatch.delenv("HANDRAIL_API", raising=False)
    monkeypatch.chdir(tmp_path)
    nvml = h100(tmp_path)
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "${POD_IP}"}
    Path("pair.yaml").write_text(pair_yaml(model="meta-llama/Llama-3.1-70B", tp=8, prefill_env=env, decode_env=env))
    flags = ("--config", "pair.yaml", "--model", str(CONFIGS / "llama-3.1-70b.json"), "--root", str(tmp_path), *H100_FLAGS)
    return nvml, flags


def doctor_output(capsys: pytest.CaptureFixture[str], nvml: FakeNvml, flags: tuple[str, ...], code: int) -> dict[str, Any]:
    assert doctor.check(parsed(*flags, "--json"), nvml.reader()) == code
    whole: dict[str, Any] = json.loads(capsys.readouterr().out)
    return whole


def verdicts(whole: dict[str, Any]) -> dict[str, str]:
    return {each["check"]: each["verdict"] for each in whole["checks"]}


def bundled(name: str) -> Scenario:
    """Return a scenario of the emulated fleet."""
    return load(name)


# --- the two pairs ----------------------------------------------------------------------------------------------------------


def test_B02_the_l40s_pair_fails_on_peer_to_peer_and_reports_1_3_seconds(
    l40s_pair: tuple[FakeNvml, tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The rate is that of the published measurement.

    So the prediction is the size and the cause, not the rate.
    """
    whole = doctor_output(capsys, *l40s_pair, code=1)
    assert [check for check, verdict in verdicts(whole).items() if verdict == "fail"] == ["gpu.p2p"]
    prediction = whole["prediction"]
    assert prediction["rate"]["source"] == "through host memory"
    assert prediction["bytes"] == pytest.approx(470e6, rel=0.01)
    assert prediction["transfer_ns"] == pytest.approx(1.3e9, rel=0.1)
    assert whole["splitting"]["answer"] == "stay collocated"
    scenario = bundled("l40s-split")
    truth_ns = scenario.kv_bytes_per_token * 8192 / scenario.link_bytes_per_s * 1e9
    assert prediction["transfer_ns"] == pytest.approx(truth_ns, rel=0.1)
    assert pytest.approx(scenario.link_bytes_per_s, rel=0.01) == HOST_STAGED_BYTES_PER_S


def test_the_h100_pair_over_rdma_passes(h100_pair: tuple[FakeNvml, tuple[str, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    whole = doctor_output(capsys, *h100_pair, code=0)
    assert whole["counts"]["fail"] == 0
    assert whole["counts"]["warn"] == 0
    prediction = whole["prediction"]
    assert (prediction["bytes"], prediction["rate"]["source"]) == (3_276_800_000, "RDMA")
    assert round(prediction["transfer_ns"] / 1e6) == 66
    scenario = bundled("h100-70b-split")
    truth_ns = scenario.kv_bytes_per_token * 10_000 / scenario.link_bytes_per_s * 1e9
    assert prediction["transfer_ns"] == pytest.approx(truth_ns, rel=0.001)
    assert {each["criterion"]: each["speaks"] for each in whole["splitting"]["reasons"]}["interconnect"] == "for splitting"


def test_the_pages(l40s_pair: tuple[FakeNvml, tuple[str, ...]], capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    nvml, flags = l40s_pair
    doctor.check(parsed(*flags), nvml.reader())
    golden("cli/doctor_l40s.txt", _stable(capsys.readouterr().out))


def test_the_page_of_the_h100_pair(
    h100_pair: tuple[FakeNvml, tuple[str, ...]], capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    nvml, flags = h100_pair
    doctor.check(parsed(*flags), nvml.reader())
    golden("cli/doctor_h100.txt", _stable(capsys.readouterr().out))


def _stable(text: str) -> str:
    """Remove the spaces that fill a table's cells."""
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def test_a_rate_that_was_measured_takes_the_place_of_the_assumed_one(
    l40s_pair: tuple[FakeNvml, tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    nvml, flags = l40s_pair
    whole = doctor_output(capsys, nvml, (*flags, "--link-gbps", "2.8912"), code=1)
    assert whole["prediction"]["rate"]["source"] == "given"
    assert whole["prediction"]["transfer_ns"] == pytest.approx(1.3e9, rel=0.001)
    assert whole["prediction"]["best_transfer_ns"] is None


# --- exit codes -------------------------------------------------------------------------------------------------------------


def test_a_warning_is_a_failure_when_strict(
    h100_pair: tuple[FakeNvml, tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    nvml, flags = h100_pair
    Path("pair.yaml").write_text(Path("pair.yaml").read_text().replace("--middleware handrail.plugin.middleware.Handrail", ""))
    whole = doctor_output(capsys, nvml, flags, code=0)
    assert (whole["counts"]["warn"], whole["own_counts"]["warn"]) == (0, 2)
    assert doctor.check(parsed(*flags, "--strict"), nvml.reader()) == 0  # the pair works without Handrail
    capsys.readouterr()
    first, _, second = Path("pair.yaml").read_text().rpartition("vllm serve")
    Path("pair.yaml").write_text(f"{first.replace('vllm serve', 'vllm serve --block-size 16')}vllm serve --block-size 32{second}")
    assert doctor_output(capsys, nvml, flags, code=0)["counts"]["warn"] == 1
    assert doctor.check(parsed(*flags, "--strict"), nvml.reader()) == 1


def test_nothing_given_is_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HANDRAIL_API", raising=False)
    assert main(["doctor", "--root", str(tmp_path)]) == doctor.EXIT_NOTHING
    out = capsys.readouterr().out
    assert "cannot be predicted: no model config (--model)" in out
    assert "0 fail" in out
    assert "Nothing was checked. Give --prefill URL" in out


def test_a_prediction_alone_is_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).parents[2] / "data/model_configs/llama-3.1-70b.json"
    assert main(["doctor", "--root", str(tmp_path), "--model", str(config), "--link-gbps", "400"]) == 0
    assert "Nothing was checked" not in capsys.readouterr().out


def test_every_line_names_its_check(l40s_pair: tuple[FakeNvml, tuple[str, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    nvml, flags = l40s_pair
    whole = doctor_output(capsys, nvml, flags, code=1)
    doctor.check(parsed(*flags), nvml.reader())
    page = capsys.readouterr().out
    assert [check for check in verdicts(whole) if f"[{check}]" not in page] == []


def test_one_address_for_both_is_remarked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("--prefill", "http://127.0.0.1:1", "--decode", "127.0.0.1:1", "--on", "neither")
    main(["doctor", *pair, "--root", str(tmp_path), "--timeout", "1", "--json"])
    assert verdicts(json.loads(capsys.readouterr().out))["pair.two_engines"] == "warn"


SIDECAR = "role: decode\ninstance: 10.0.0.8:8200\nplugin_socket: /run/handrail/other.sock\ncollector: {endpoint: 'http://127.0.0.1:1'}\n"


def test_a_sidecars_configuration_is_held_against_the_engine(
    h100_pair: tuple[FakeNvml, tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    nvml, flags = h100_pair
    Path("sidecar.yaml").write_text(SIDECAR)
    whole = doctor_output(capsys, nvml, (*flags, "--config", "sidecar.yaml"), code=1)
    assert {check for check, verdict in verdicts(whole).items() if verdict == "fail"} == {"engine.decode.plugin", "path.otlp"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prefill", "ftp://x"), "--prefill is 'ftp://x'"),
        (("--prefill", "http://"), "--prefill is 'http://'"),
        (("--decode", "http://x:99999"), "--decode is"),
        (("--tokens", "0"), "--tokens is 0"),
        (("--rate", "nan"), "--rate is nan"),
        (("--ttft", "soon"), "--ttft: "),
        (("--itl", "0ms"), "--itl is 0"),
        (("--prefill-gpus", "a"), "--prefill-gpus is 'a'"),
        (("--decode-side-channel", "host"), "--decode-side-channel is 'host'"),
        (("--header", "token"), "--header has no value"),
        (("--same-env",), "--same-env needs the engine of this environment"),
        (("--timeout", "0"), "--timeout is 0"),
        (("--tokens", "20000000000"), "above 0, at most 1,000,000,000"),
        (("--model", "/nowhere"), "cannot be read"),
        (("--config", "/nowhere.yaml"), "cannot be read"),
        (("--placement", "here"), "invalid choice"),
    ],
)
def test_what_is_refused_ends_with_2(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *flags]) == 2
    assert message in capsys.readouterr().err
    assert main(["doctor", *flags, "--json"]) == 2
    assert "error" in json.loads(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("content", "output"),
    [
        (b"\x7fELF\x02\x80\xff", "cannot be read: YAML must be UTF-8 text"),
        (b"a: b\0c", "is not valid YAML: special characters are not allowed"),
        (b"a: [b", "is not valid YAML: expected ',' or ']'"),
    ],
    ids=["binary", "nul", "cut"],
)
def test_a_file_that_is_no_yaml_is_reported_with_the_readable_formats(
    content: bytes, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pair.yaml"
    file.write_bytes(content)
    assert main(["doctor", "--config", str(file)]) == 2
    reported_output = capsys.readouterr().err
    assert output in reported_output
    assert "valid:   Kubernetes or Compose YAML with 'vllm serve' in a command" in reported_output
    assert "codec" not in reported_output
    assert "\\n" not in reported_output


@pytest.mark.parametrize(
    ("holds", "made_by", "not_by"),
    [
        ("kustomization.yaml", "kubectl kustomize", "helm"),
        ("Chart.yaml", "helm template NAME", "kubectl"),
        ("pair.yaml", "kubectl kustomize", "compose config"),
    ],
)
def test_of_a_folder_it_says_how_it_becomes_a_file(
    holds: str, made_by: str, not_by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / holds).touch()
    assert main(["doctor", "--config", str(tmp_path)]) == 2
    reported_output = capsys.readouterr().err
    assert "--config needs a file, and this is a folder: Kubernetes or Compose YAML" in reported_output
    assert f"{made_by} {tmp_path}" in reported_output
    assert not_by not in reported_output


def test_a_wrong_sidecar_configuration_is_reported_one_line_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sidecar.yaml"
    file.write_text("role: decode\nlisten: nowhere\nspol: {}\n", "utf-8")
    assert main(["doctor", "--config", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"handrail doctor: {file}: 2 problems"
    assert any(line.startswith("  spol: unknown; did you mean spool") for line in lines)
    assert lines[-1] == f"  valid:   correct the file; 'handrail config check {file}' lists the same problems"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not valid YAML"),
        ("services: {web: {command: nginx}}", "holds neither an engine nor a sidecar"),
        ("", "neither an engine nor a sidecar"),
        ("role: decode\nunknown: 1\n", "unknown"),
        ("services: {server: {command: vllm serve x}}", "cannot tell whether server is prefill or decode"),
    ],
)
def test_files_that_say_nothing(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(text)
    assert main(["doctor", "--config", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_P09_a_model_whose_kv_is_not_known_is_checked_without_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    case = CONFIGS.parent / "second/P09"
    flags = ("--config", str(case / "pair_differs.yaml"), "--model", str(case / "config.json"), "--on", "neither", "--json")
    assert doctor.run(parsed(*flags)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "compress_ratios" in answer["prediction"]["missing"]
    assert [each["verdict"] for each in answer["checks"] if each["check"] == "pair.block_size"] == ["warn"]
    assert answer["own_counts"]["warn"] == 4
