"""What is changed of kind's files, which come from its Go module at build time."""

import pytest

from torchrun_cluster import binaries, node_image
from torchrun_cluster.errors import ClusterError

CONFIG = """\
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "registry.k8s.io/pause:3.10"
  restrict_oom_score_adj = false
"""
SOURCE = """\
package nodeimage

const storageProvisionerImage = "docker.io/kindest/local-path-provisioner:v1"
const storageHelperImage = "docker.io/kindest/local-path-helper:v2"

const defaultStorageManifest = `
kind: Namespace
image: ` + storageProvisionerImage + `
helper: ` + storageHelperImage + `
`
"""


def test_containerd_uses_the_pause_image_of_kubeadm() -> None:
    changed = node_image.sandbox_setting(CONFIG, "registry.k8s.io/pause:3.10.1")
    assert 'sandbox_image = "registry.k8s.io/pause:3.10.1"' in changed
    assert "restrict_oom_score_adj = true" in changed


def test_the_storage_manifest_names_its_images() -> None:
    manifest, names = node_image.storage_manifest(SOURCE)
    assert manifest == (
        "\nkind: Namespace\nimage: docker.io/kindest/local-path-provisioner:v1\n"
        "helper: docker.io/kindest/local-path-helper:v2\n"
    )
    assert names[node_image.HELPER] == "docker.io/kindest/local-path-helper:v2"


@pytest.mark.parametrize("source", ["", SOURCE.replace("storageHelperImage =", "other =")])
def test_another_form_of_kinds_files_is_an_error(source: str) -> None:
    with pytest.raises(ClusterError, match="another form"):
        node_image.storage_manifest(source)
    with pytest.raises(ClusterError, match="another form"):
        node_image.sandbox_setting(source, "pause")


def test_kubeadm_has_the_version_of_the_kubelet() -> None:
    assert binaries.version_of("kubeadm", node_image.RELEASE) == binaries.version_of(
        "kubelet", node_image.RELEASE
    )
