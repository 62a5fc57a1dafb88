"""Token files: what they may hold, and who gets access."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.security.file_reload import ReloadingFile
from handrail.security.tokens import Authenticator, bearer, known, tokens
from harness.certs import replace

ONE, TWO = "0123456789abcdef", "fedcba9876543210"


def held(tmp_path: Path, content: str) -> ReloadingFile[tuple[str, ...]]:
    file = tmp_path / "tokens"
    replace(file, content.encode("utf-8"))
    return tokens(file, use="tokens", setting="auth.token_file")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (ONE, (ONE,)),
        (f"{ONE}\n{TWO}\n", (ONE, TWO)),
        (f"# new\n  {ONE} \r\n\n# old, until June\n{TWO}", (ONE, TWO)),
        ("eyJhbGciOiJub25lIn0.e30.x-_~+/==", ("eyJhbGciOiJub25lIn0.e30.x-_~+/==",)),
    ],
)
def test_one_token_a_line(content: str, expected: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert held(tmp_path, content).value == expected
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no token"),
        ("# none\n\n", "holds no token"),
        (f"Bearer {ONE}", "line 1 is not a token"),
        (f"{ONE}\nsesame=open\n", "line 2 is not a token"),
        ("schlüsselwort-sesam", "characters that are not ASCII"),
    ],
)
def test_what_is_no_token_is_refused_and_not_repeated(content: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        held(tmp_path, content)
    assert str(caught.value).startswith(f"auth.token_file: {tmp_path / 'tokens'}")
    assert ONE not in str(caught.value)
    assert "sesam" not in str(caught.value)


def test_a_token_that_can_be_guessed_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held(tmp_path, "sesame")
    assert "6 characters can be guessed" in caplog.text
    assert "sesame" not in caplog.text


@pytest.mark.parametrize(
    ("authorization", "status", "challenge"),
    [
        pytest.param([bearer(ONE)], None, "", id="first"),
        pytest.param([bearer(TWO)], None, "", id="second"),
        pytest.param([f"bearer  {TWO} "], None, "", id="scheme-in-any-case"),
        pytest.param([], 401, 'Bearer realm="handrail"', id="none"),
        pytest.param([""], 401, 'Bearer realm="handrail", error="invalid_token"', id="empty"),
        pytest.param([ONE], 401, 'Bearer realm="handrail", error="invalid_token"', id="no-scheme"),
        pytest.param([f"Basic {ONE}"], 401, 'Bearer realm="handrail", error="invalid_token"', id="other-scheme"),
        pytest.param([bearer(ONE[:-1])], 401, 'Bearer realm="handrail", error="invalid_token"', id="a-part-of-one"),
        pytest.param([bearer(f"{ONE}\n{TWO}")], 401, 'Bearer realm="handrail", error="invalid_token"', id="both"),
        pytest.param([bearer("schlüssel\udcff")], 401, 'Bearer realm="handrail", error="invalid_token"', id="not-ascii"),
        pytest.param([bearer(ONE), bearer("x")], 401, 'Bearer realm="handrail", error="invalid_token"', id="two-headers"),
    ],
)
def test_who_is_let_in(authorization: list[str], status: int | None, challenge: str, tmp_path: Path) -> None:
    guard = Authenticator("api", held(tmp_path, f"{ONE}\n{TWO}"))
    denied = guard.denial(authorization)
    assert (denied.status if denied else None) == status
    if denied is not None:
        assert denied.headers == {"WWW-Authenticate": challenge}
    assert guard.refused == (status is not None)


def test_a_certificate_that_was_requested_but_not_required(tmp_path: Path) -> None:
    guard = Authenticator("api", held(tmp_path, ONE), certificates=True)
    denied = guard.denial([bearer(ONE)], certified=False)
    assert denied is not None
    assert (denied.status, denied.headers) == (403, {})
    assert "tls.client_ca_file" in denied.reason
    assert guard.denial([bearer(ONE)], certified=True) is None
    assert guard.denial([], certified=True) is not None


def test_nothing_is_wanted() -> None:
    guard = Authenticator("api")
    assert guard.open
    assert guard.denial([]) is None


def test_tokens_are_changed_without_a_gap(tmp_path: Path) -> None:
    found = held(tmp_path, ONE)
    guard = Authenticator("api", found)

    def lets_in(token: str) -> bool:
        return guard.denial([bearer(token)]) is None

    replace(tmp_path / "tokens", f"{TWO}\n{ONE}\n".encode())
    assert not lets_in(TWO)
    assert found.poll()
    assert lets_in(ONE)
    assert lets_in(TWO)
    replace(tmp_path / "tokens", TWO.encode())
    assert found.poll()
    assert not lets_in(ONE)
    assert lets_in(TWO)
    replace(tmp_path / "tokens", b"")  # emptied by mistake: no client loses access
    found.poll(), found.poll()
    assert lets_in(TWO)
    assert "holds no token" in found.refused


def test_each_host_is_logged_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    guard = Authenticator("otlp_http", held(tmp_path, ONE))
    denied = guard.denial([])
    assert denied is not None
    for host in [*("10.0.0.7",) * 3, *(f"10.0.1.{number}" for number in range(100))]:
        guard.log_denial(denied, host)
    assert len(caplog.records) == 64
    assert "otlp_http: refused a request from 10.0.0.7: a token is required" in caplog.records[0].getMessage()


@given(st.lists(st.text(max_size=8), max_size=5), st.text(max_size=8))
def test_known_is_membership(valid: list[str], token: str) -> None:
    assert known(token, valid) is (token in valid)
