"""Command lines, cache keys and configuration as pure functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from torchrun_cluster import addons, binaries, cgroups, components, images, oci, places
from torchrun_cluster.errors import ClusterError
from torchrun_cluster.state import Ports, Size, Spec, State


def cluster(size: Size, **extra: list[str]) -> State:
    arguments = {name.replace("_", "-"): flags for name, flags in extra.items()}
    return State(Spec("demo", size, extra_args=arguments), Ports(26443, 26444, 26445, 26446))


def three_nodes(**extra: list[str]) -> State:
    one = cluster(Size.NODE, **extra)
    return replace(one, spec=replace(one.spec, nodes=3))


def test_extra_arguments_come_last_so_that_they_win() -> None:
    state = cluster(Size.CONTROL_PLANE, kube_controller_manager=["--kube-api-qps=20"])
    program = Path("/bin/kcm")
    line = components.command(
        state, "kube-controller-manager", {"kube-controller-manager": program}
    )
    assert line[0] == "/bin/kcm"
    assert line[-1] == "--kube-api-qps=20"
    assert "--kube-api-qps=200" in line


def test_a_control_plane_listens_on_its_claimed_ports_only() -> None:
    state = cluster(Size.CONTROL_PLANE)
    line = components.command(state, "kube-apiserver", {})
    assert "--secure-port=26443" in line
    assert "--bind-address=127.0.0.1" in line
    assert "--etcd-servers=http://127.0.0.1:26444" in line
    for component in ("kube-controller-manager", "kube-scheduler"):
        assert "--secure-port=0" in components.command(state, component, {})


def test_a_node_has_the_usual_ports_in_its_own_namespace() -> None:
    line = components.command(cluster(Size.NODE), "kube-apiserver", {})
    assert "--secure-port=6443" in line
    assert "--kubelet-preferred-address-types=InternalIP" in line


def test_every_node_has_a_kubelet_of_its_own() -> None:
    state = three_nodes(kubelet=["--v=4"])
    lines = [components.command(state, node.component("kubelet"), {}) for node in state.nodes]
    for (name, address), line in zip(
        (("node", "10.244.0.1"), ("node-2", "10.244.1.1"), ("node-3", "10.244.2.1")),
        lines,
        strict=True,
    ):
        assert line[0] == "kubelet"
        assert {f"--hostname-override={name}", f"--node-ip={address}"} <= set(line)
        assert line[-1] == "--v=4"
    files = [{word for word in line if "=/" in word} for line in lines]
    assert not files[0] & files[1] | files[1] & files[2]
    with pytest.raises(ClusterError, match="no node 'node-4'"):
        components.command(state, "kubelet@node-4", {})


@pytest.mark.parametrize("state", [*map(cluster, Size), three_nodes()])
def test_every_component_has_a_command_line(state: State) -> None:
    added = [component for addon in addons.ADDONS.values() for component in addon.subjects]
    for component in (*state.spec.components, *added):
        if component.partition("@")[0] not in ("anchor", "forwarder"):
            assert components.command(state, component, {})
    with pytest.raises(ClusterError, match="unknown component"):
        components.command(state, "kubeadm", {})


def test_every_part_of_a_build_changes_its_key() -> None:
    keys = {
        binaries.key([b"mod", b"sum"], "flags", "go1"),
        binaries.key([b"mod2", b"sum"], "flags", "go1"),
        binaries.key([b"mod", b"sum2"], "flags", "go1"),
        binaries.key([b"modsum", b""], "flags", "go1"),
        binaries.key([b"mod", b"sum"], "flags2", "go1"),
        binaries.key([b"mod", b"sum"], "flags", "go2"),
    }
    assert len(keys) == 6
    assert binaries.key([b"a"], "b", "c") == binaries.key([b"a"], "b", "c")


def test_every_module_pins_the_version_that_it_reports() -> None:
    versions = {m.folder: binaries.version(m) for m in binaries.MODULES if m.pinned}
    assert all(version.startswith("v") for version in versions.values())


def test_every_supported_release_has_a_module_that_pins_it() -> None:
    for minor, module in binaries.KUBERNETES_RELEASES.items():
        assert binaries.version(module).startswith(f"v{minor}.")


def test_only_a_supported_release_can_be_asked_for() -> None:
    default = binaries.DEFAULT_KUBERNETES
    assert (
        binaries.wanted_kubernetes({}) == binaries.wanted_kubernetes({"KUBERNETES": ""}) == default
    )
    assert binaries.wanted_kubernetes({"KUBERNETES": "1.33"}) == "1.33"
    with pytest.raises(
        ClusterError, match=r"'1\.32': it must be one of 1\.33, 1\.34, 1\.35, 1\.36, 1\.37$"
    ):
        binaries.wanted_kubernetes({"KUBERNETES": "1.32"})


def test_cgroup_hierarchies_of_both_versions_are_found() -> None:
    mountinfo = """\
25 30 0:23 / /proc rw,relatime shared:12 - proc proc rw
31 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct
32 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
33 24 0:29 /a /mnt/cgroup rw - ext4 /dev/sda rw
"""
    found = cgroups.hierarchies(mountinfo)
    assert found == [Path("/sys/fs/cgroup/cpu,cpuacct"), Path("/sys/fs/cgroup/unified")]


def test_places_follow_their_variables() -> None:
    assert places.cache_home({"TORCHRUN_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert places.cache_home({"XDG_CACHE_HOME": "/x"}) == Path("/x/torchrun-controller")
    assert places.state_home({"TORCHRUN_CACHE": "/c"}) == Path("/c/clusters")
    assert places.state_home({"TORCHRUN_CACHE": "/c", "TORCHRUN_STATE": "/s"}) == Path("/s")


def test_only_settings_that_hold_inside_a_build_are_passed_to_pip() -> None:
    environment = {"PIP_INDEX_URL": "https://index.test/simple", "PIP_FIND_LINKS": "/wheels"}
    expected = "[global]\nindex-url = https://index.test/simple\n"
    assert images.pip_configuration(environment) == expected
    assert images.pip_configuration({"PIP_FIND_LINKS": "/wheels"}) == ""


def test_a_program_image_is_readable_and_always_the_same(tmp_path: Path) -> None:
    program = tmp_path / "pause"
    program.write_bytes(b"\x7fELF")
    digests = set()
    for number in range(2):
        archive = tmp_path / f"{number}.tar"
        oci.write_program_image(archive, "localhost/pause:latest", program)
        (image,) = oci.images_in(archive)
        assert image.name == "localhost/pause:latest"
        digests.add((image.digest, oci.configuration_digest(archive)))
    assert len(digests) == 1


def test_a_file_that_is_no_image_shows_how_to_build_one(tmp_path: Path) -> None:
    broken = tmp_path / "broken.tar"
    broken.write_bytes(b"not a tar")
    with pytest.raises(ClusterError, match="oci-archive"):
        oci.images_in(broken)
