"""Checks of RDMA, UCX's choices, NIXL and network interfaces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders.doctor_facts import SOCKET, D, P, facts, found, gpus, host, port, same_host, setup, verdict, view
from handrail_doctor.checks.result import CheckStatus
from handrail_doctor.facts import Facts, Gid, Nic, PairSide, RdmaPort
from handrail_doctor.prediction import predicted
from handrail_doctor.transports import devices, transports


def on_ports(*ports: RdmaPort, env: dict[str, str] | None = None, **more: Any) -> Facts:
    engine = view(D, setup(D, env={**SOCKET, **(env or {})}))
    return facts(engine, host=host(rdma=ports, **more))


def down(adapter: str, **more: Any) -> RdmaPort:
    return port(adapter, state="DOWN", physical="Polling", **more)


def test_ports_that_are_up_pass_and_those_down_are_named() -> None:
    finding = found(on_ports(port("mlx5_0"), port("mlx5_1"), down("mlx5_2")), "wire.rdma")
    assert finding is not None
    assert finding.verdict is CheckStatus.PASS
    assert finding.seen == "mlx5_0:1, mlx5_1:1 at 400 Gb/s InfiniBand; not up: mlx5_2:1 DOWN (Polling)"


def test_across_hosts_rdma_is_needed() -> None:
    assert verdict(on_ports(), "wire.rdma") is CheckStatus.FAIL
    assert verdict(on_ports(down("mlx5_0")), "wire.rdma") is CheckStatus.FAIL
    assert verdict(on_ports(port(state="")), "wire.rdma") is CheckStatus.FAIL  # a state that cannot be read is not up


def test_a_host_without_an_engine_says_nothing_of_the_engines_wire() -> None:
    """A host without an engine (CI, a laptop) proves nothing about the engines' wire.

    Its lack of adapters and its slow interface are not the engines'.
    """
    elsewhere = facts(host=host(here=frozenset(), nics=(Nic(name="eth0", up=True, physical=True, bits_per_s=1e9, mtu=1500),)))
    assert verdict(elsewhere, "wire.rdma") is CheckStatus.SKIP
    assert "no engine runs here, as far as the doctor knows" in str(found(elsewhere, "wire.rdma"))
    assert found(elsewhere, "wire.nic") is None
    assert predicted(elsewhere) is None
    adapters = facts(host=host(here=frozenset(), rdma=(port("a"), port("b", bits_per_s=100e9))))
    assert verdict(adapters, "wire.rdma") is CheckStatus.SKIP
    assert found(adapters, "wire.rate") is None
    assert predicted(adapters) is None


def test_within_a_host_it_is_not() -> None:
    assert verdict(same_host(), "wire.rdma") is CheckStatus.SKIP
    assert verdict(same_host(host=host(rdma=(down("mlx5_0"),), gpus=gpus())), "wire.rdma") is CheckStatus.WARN


def test_a_sysfs_that_cannot_be_read_is_no_host_without_rdma() -> None:
    finding = found(facts(host=host(rdma=None, unread=("/sys/class/infiniband cannot be read",))), "wire.rdma")
    assert finding is not None
    assert (finding.verdict, finding.seen) == (CheckStatus.SKIP, "/sys/class/infiniband cannot be read")


def test_ports_of_other_rates_or_lanes_warn() -> None:
    assert verdict(on_ports(port("a"), port("b", bits_per_s=100e9)), "wire.rate") is CheckStatus.WARN
    assert verdict(on_ports(port(lanes=1, bits_per_s=100e9)), "wire.rate") is CheckStatus.WARN
    assert verdict(on_ports(port("a"), port("b")), "wire.rate") is CheckStatus.PASS
    assert found(on_ports(port(bits_per_s=None)), "wire.rate") is None


def roce(**more: Any) -> RdmaPort:
    gids = (Gid(index=0, address="fe80::1", kind="IB/RoCE v1"), Gid(index=3, address="::ffff:10.0.0.7", kind="RoCE v2"))
    return port(link_layer="Ethernet", netdev="eth1", **{"gids": gids, **more})


def test_roce_needs_a_large_mtu_for_its_rate() -> None:
    def with_mtu(mtu: int | None) -> Facts:
        return on_ports(roce(), nics=(Nic(name="eth1", up=True, bits_per_s=100e9, mtu=mtu, physical=True),))

    assert verdict(with_mtu(1500), "wire.mtu") is CheckStatus.WARN
    assert verdict(with_mtu(9000), "wire.mtu") is CheckStatus.PASS
    assert found(with_mtu(None), "wire.mtu") is None
    assert found(on_ports(port()), "wire.mtu") is None  # sysfs does not show InfiniBand's


def test_roce_needs_a_gid_with_an_address() -> None:
    assert verdict(on_ports(roce()), "wire.gid") is CheckStatus.PASS
    assert verdict(on_ports(roce(gids=())), "wire.gid") is CheckStatus.FAIL
    only_local = (Gid(index=1, address="fe80:0000:0000:0000:0e42:a1ff:fe00:0001", kind="RoCE v2"),)
    assert verdict(on_ports(roce(gids=only_local)), "wire.gid") is CheckStatus.FAIL
    nonsense = (Gid(index=1, address="what", kind="RoCE v2"),)
    assert verdict(on_ports(roce(gids=nonsense)), "wire.gid") is CheckStatus.FAIL
    assert found(on_ports(port()), "wire.gid") is None


@pytest.mark.parametrize(
    ("index", "verdict_"), [("3", CheckStatus.PASS), ("0", CheckStatus.FAIL), ("7", CheckStatus.FAIL), ("auto", CheckStatus.PASS)]
)
def test_the_chosen_gid_must_be_one(index: str, verdict_: CheckStatus) -> None:
    assert verdict(on_ports(roce(), env={"UCX_IB_GID_INDEX": index}), "wire.gid") is verdict_


class TestDevices:
    """Case B08: device choices that hang, or that slow down the first hand-off.

    It hangs for 300 s where a device leads nowhere; the first hand-off takes 38 s where there are too many devices.
    """

    def test_B08_one_that_is_not_there_or_down_fails(self) -> None:
        for named in ("mlx5_9:1", "mlx5_1:1", "mlx5_0:2", "mlx5_0:1,mlx5_1:1"):
            finding = found(on_ports(port("mlx5_0"), down("mlx5_1"), env={"UCX_NET_DEVICES": named}), "wire.ucx_devices")
            assert finding is not None
            assert finding.verdict is CheckStatus.FAIL, named
            assert "300 s" in finding.why
            assert finding.do.endswith("mlx5_0:1")

    def test_B08_ports_that_differ_and_no_choice_warn(self) -> None:
        finding = found(on_ports(port("mlx5_0"), port("mlx5_bond", link_layer="Ethernet", bits_per_s=25e9)), "wire.ucx_devices")
        assert finding is not None
        assert finding.verdict is CheckStatus.WARN
        assert "38 s" in finding.why
        assert finding.do.endswith("mlx5_0:1")
        assert verdict(on_ports(port("a"), port("b"), down("c")), "wire.ucx_devices") is CheckStatus.WARN

    @pytest.mark.parametrize("named", [None, "all", "mlx5_0:1", "mlx5_0", "eth0"])
    def test_what_is_there_passes(self, named: str | None) -> None:
        nics = (Nic(name="eth0", up=True, bits_per_s=None, mtu=1500, physical=True),)
        whole = on_ports(port("mlx5_0"), env={"UCX_NET_DEVICES": named} if named else {}, nics=nics)
        assert verdict(whole, "wire.ucx_devices") is CheckStatus.PASS

    def test_what_is_not_known_is_skipped(self) -> None:
        unknown = facts(view(P, setup(P, env=None)), view(D, setup(D, env=None)), host=host(rdma=(port(),)))
        assert verdict(unknown, "wire.ucx_devices") is CheckStatus.SKIP
        elsewhere = on_ports(env={"UCX_NET_DEVICES": "mlx5_0:1"}, here=frozenset())
        assert verdict(elsewhere, "wire.ucx_devices") is CheckStatus.SKIP
        unread = facts(view(D, setup(D, env={"UCX_NET_DEVICES": "mlx5_0:1"})), host=host(rdma=None))
        assert verdict(unread, "wire.ucx_devices") is CheckStatus.SKIP

    def test_what_may_be_set_where_they_run_is_not_judged(self) -> None:
        engine = view(D, setup(D, elsewhere=frozenset({"UCX_NET_DEVICES"})))
        assert verdict(facts(engine, host=host(rdma=(port(),))), "wire.ucx_devices") is CheckStatus.SKIP

    def test_the_local_engine_is_queried_first(self) -> None:
        sides = {P: "mlx5_0:1", D: "mlx5_9:1"}
        views = [view(side, setup(side, env={"UCX_NET_DEVICES": named})) for side, named in sides.items()]
        on_p = facts(*views, host=host(rdma=(port(),), here=frozenset({PairSide.PREFILL})))
        assert verdict(on_p, "wire.ucx_devices") is CheckStatus.PASS


@pytest.mark.parametrize(
    ("tls", "verdict_"),
    [
        ("all", CheckStatus.PASS),
        ("rc,cuda_copy,cuda_ipc", CheckStatus.PASS),
        ("dc_x,cuda", CheckStatus.PASS),
        ("^tcp", CheckStatus.PASS),
        ("tcp,cuda_copy,self,sm", CheckStatus.FAIL),  # adapters are up, and KV would go over TCP
        ("^ib,cuda_ipc", CheckStatus.FAIL),
        ("rc", CheckStatus.FAIL),  # without cuda_copy UCX cannot access GPU memory
    ],
)
def test_transports_across_hosts(tls: str, verdict_: CheckStatus) -> None:
    assert verdict(on_ports(port(), env={"UCX_TLS": tls}, gpus=gpus()), "wire.ucx_tls") is verdict_


def test_transports_within_a_host_need_cuda_ipc() -> None:
    def whole(tls: str) -> Facts:
        return same_host(view(D, setup(D, env={**SOCKET, "UCX_TLS": tls})))

    assert verdict(whole("tcp,cuda_copy"), "wire.ucx_tls") is CheckStatus.FAIL
    assert verdict(whole("tcp,cuda_copy,cuda_ipc"), "wire.ucx_tls") is CheckStatus.PASS
    assert found(same_host(), "wire.ucx_tls") is None


def test_the_pair_of_the_test_bed_is_no_failure() -> None:
    """The test bed is a CPU pair over TCP: no GPU, no adapter."""
    whole = same_host(view(D, setup(D, env={**SOCKET, "UCX_TLS": "tcp,self,sm"})), host=host())
    assert verdict(whole, "wire.ucx_tls") is CheckStatus.PASS


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a first run builds tables of characters
@given(st.text(max_size=40))
def test_any_text_is_read_as_transports_and_devices(text: str) -> None:
    assert isinstance(transports(text), frozenset)
    assert devices(text) is None or all(devices(text) or ())


def test_nixl() -> None:
    assert verdict(facts(host=host(packages={"nixl": "1.5.1", "nixl-cu12": "1.5.1"})), "wire.nixl") is CheckStatus.PASS
    assert verdict(facts(host=host(packages={"nixl-cu12": "1.5.1", "nixl-cu13": "1.6.0"})), "wire.nixl") is CheckStatus.WARN
    assert verdict(facts(), "wire.nixl") is CheckStatus.SKIP
    other = facts(view(P, setup(P, connector="LMCacheConnectorV1")), view(D, setup(D, connector="LMCacheConnectorV1")))
    assert found(other, "wire.nixl") is None
    backend = found(facts(view(D, setup(D, backends=("GDS",))), host=host(packages={"nixl": "1"})), "wire.nixl")
    assert backend is not None
    assert backend.seen.endswith("backend GDS")


def test_interfaces_matter_where_there_is_no_rdma() -> None:
    def with_nics(*nics: Nic) -> Facts:
        return on_ports(nics=nics)

    slow = Nic(name="eth0", up=True, bits_per_s=10e9, mtu=1500, physical=True)
    fast = Nic(name="eth1", up=True, bits_per_s=100e9, mtu=9000, physical=True)
    assert verdict(with_nics(slow), "wire.nic") is CheckStatus.WARN
    assert verdict(with_nics(slow, fast), "wire.nic") is CheckStatus.PASS
    assert (
        verdict(with_nics(Nic(name="eth0", up=True, bits_per_s=None, mtu=None, physical=False)), "wire.nic") is CheckStatus.SKIP
    )
    assert found(on_ports(port(), nics=(slow,)), "wire.nic") is None
    assert found(same_host(), "wire.nic") is None
