"""A cluster's own certificate authority and the certificates of its components."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .errors import ClusterError

DAYS = "3650"
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")


@dataclass(frozen=True)
class Subject:
    """Who a certificate speaks for; `names` are subject alternative names, openssl's notation."""

    file: str
    common_name: str
    organization: str = ""
    names: Sequence[str] = ()


ADMIN = Subject("admin", "torchrun-admin", "system:masters")
CONTROLLER_MANAGER = Subject("kube-controller-manager", "system:kube-controller-manager")
SCHEDULER = Subject("kube-scheduler", "system:kube-scheduler")
PROXY = Subject("kube-proxy", "system:kube-proxy")
# These two are usually pods with a service account; here they run outside of any pod.
DNS = Subject("coredns", "coredns", "system:masters")
VOLUMES = Subject("local-path-provisioner", "local-path-provisioner", "system:masters")
API_TO_KUBELET = Subject("apiserver-kubelet-client", "kube-apiserver", "system:masters")


def kubelet(file: str, node: str, address: str) -> Subject:
    """The node's certificate, for its calls to the API server and for its own port."""
    names = (f"DNS:{node}", f"IP:{address}")
    return Subject(file, f"system:node:{node}", "system:nodes", names)


def api_server(addresses: Sequence[str]) -> Subject:
    """The API server's serving certificate."""
    service = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
    names = ("localhost", *service, "kubernetes.default.svc.cluster.local")
    alternatives = [f"DNS:{name}" for name in names] + [f"IP:{ip}" for ip in addresses]
    return Subject("kube-apiserver", "kube-apiserver", "", alternatives)


class Authority:
    """Certificates in one folder: ca.crt, ca.key, NAME.crt, NAME.key, sa.key, sa.pub.

    `names` are the authority's own alternative names. `rsa` makes its key an RSA key in PKCS #1
    form, for programs that read no other.
    """

    def __init__(self, folder: Path, names: Sequence[str] = (), *, rsa: bool = False) -> None:
        self.folder = folder
        self._names = _alternatives(names)
        self._rsa = rsa
        self.certificate = folder / "ca.crt"
        self.service_account_key = folder / "sa.key"
        self.service_account_public_key = folder / "sa.pub"

    def create(self, subjects: Sequence[Subject]) -> None:
        """Make the authority, the service accounts' signing key and all certificates."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = str(self.folder / "ca.key")
        if self._rsa:
            _openssl("genrsa", "-traditional", "-out", key, "2048")
        # Python 3.13 and later refuse an authority without key usage and key identifiers.
        _openssl(
            *("req", "-x509", "-new"),
            *(("-key", key) if self._rsa else (*NEW_KEY, "-keyout", key)),
            *("-nodes", "-days", DAYS, "-subj", "/CN=torchrun-cluster"),
            *("-addext", "basicConstraints=critical,CA:TRUE"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"),
            *self._names,
            *("-out", str(self.certificate)),
        )
        with ThreadPoolExecutor() as pool:
            signing = pool.submit(self._signing_key)
            list(pool.map(self.issue, subjects))
            signing.result()

    def kubeconfig(self, path: Path, name: str, server: str, subject: Subject) -> None:
        """Write a kubeconfig (JSON, which is YAML) that holds everything itself."""
        encoded = {
            key: base64.b64encode((self.folder / file).read_bytes()).decode()
            for key, file in (
                ("certificate-authority-data", "ca.crt"),
                ("client-certificate-data", f"{subject.file}.crt"),
                ("client-key-data", f"{subject.file}.key"),
            )
        }
        authority = {"certificate-authority-data": encoded.pop("certificate-authority-data")}
        context = {"cluster": name, "user": name}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": {"server": server, **authority}}],
            "users": [{"name": name, "user": encoded}],
            "contexts": [{"name": name, "context": context}],
            "current-context": name,
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(content, indent=2) + "\n")

    def _signing_key(self) -> None:
        private, public = str(self.service_account_key), str(self.service_account_public_key)
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", private)
        _openssl("ec", "-in", private, "-pubout", "-out", public)

    def issue(self, subject: Subject) -> None:
        """Make one certificate, of an authority that was created."""
        organization = f"/O={subject.organization}" if subject.organization else ""
        key = str(self.folder / f"{subject.file}.key")
        _openssl(
            *("req", "-x509", "-new", *NEW_KEY),
            *("-CA", str(self.certificate), "-CAkey", str(self.folder / "ca.key")),
            *("-nodes", "-days", DAYS, "-subj", f"{organization}/CN={subject.common_name}"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-addext", "keyUsage=critical,digitalSignature"),
            *("-addext", "extendedKeyUsage=serverAuth,clientAuth"),
            *_alternatives(subject.names),
            *("-keyout", key, "-out", str(self.folder / f"{subject.file}.crt")),
        )


def _alternatives(names: Sequence[str]) -> Sequence[str]:
    return ("-addext", f"subjectAltName={','.join(names)}") if names else ()


def _openssl(*arguments: str) -> None:
    try:
        result = subprocess.run(
            ["openssl", *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise ClusterError("openssl is not installed; run: apt-get install -y openssl") from None
    if result.returncode:
        raise ClusterError(
            f"openssl {arguments[0]} failed (3.0 or later is needed): {result.stderr.strip()}"
        )
