"""s3: the objects of a prefix as files, or one archive."""

import hashlib
import shutil
import ssl
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from torchrun_api.contract.contents import Manifest
from torchrun_runtime.sync.address import (
    ENDPOINT_FIELD,
    URL_FIELD,
    Location,
    parse_endpoint,
    parse_s3,
    resolve,
)
from torchrun_runtime.sync.archives.tarball import extract_tar
from torchrun_runtime.sync.archives.zip import extract
from torchrun_runtime.sync.errors import ArchiveError, SyncError
from torchrun_runtime.sync.paths import PlannedPath, components
from torchrun_runtime.sync.s3.client import Bucket, BucketEndpoint, BucketObject
from torchrun_runtime.sync.s3.signature import KeyPair
from torchrun_runtime.sync.secret import Secret
from torchrun_runtime.sync.settings import ArchiveLimits
from torchrun_runtime.sync.tree import NewTree, check_places, too_many

_KEY_ID, _KEY = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"
_REGION, _ENDPOINT, _TOKEN = "AWS_REGION", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"
# Optional keys of the Secret of a public bucket.
_PUBLIC = {"ca.crt", _REGION, _ENDPOINT}
_DEFAULT_REGION = "us-east-1"
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
# Many small objects are read at a time, because each needs a round trip.
_SMALL = 1 << 20
_THREADS = 8
_BATCH = 64


def open_bucket(url: str, secret: Secret, deadline: float) -> tuple[Bucket, str]:
    """The bucket of a URL, and the key or prefix in it. Raises SyncError."""
    location = parse_s3(url)
    region = secret.word(_REGION) or _DEFAULT_REGION
    field = URL_FIELD
    if location.scheme == "s3":
        # Of the URL itself: old buckets have capitals, which are not kept in a host.
        bucket, key = url.removeprefix("s3://").partition("/")[0], location.path
        domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        location = parse_endpoint(secret.word(_ENDPOINT) or f"https://s3.{region}.{domain}")
        field = ENDPOINT_FIELD
    else:
        bucket, _, key = location.path.partition("/")
    endpoint = BucketEndpoint(
        location=location,
        addresses=resolve(location.host, location.port, field),
        bucket=bucket,
        credentials=_credentials(secret, region),
        tls=_tls(location, secret),
        deadline=deadline,
        scrub=secret.scrub,
    )
    return Bucket(endpoint), key


def _credentials(secret: Secret, region: str) -> KeyPair | None:
    keys = set(secret.keys())
    if not secret.name or (keys and keys <= _PUBLIC):
        return None
    secret.require(_KEY_ID, _KEY, why="a bucket that is not public is read with a key pair")
    return KeyPair(secret.word(_KEY_ID), secret.text(_KEY), region, secret.word(_TOKEN))


def _tls(location: Location, secret: Secret) -> ssl.SSLContext | None:
    if location.scheme == "http":
        return None
    context = ssl.create_default_context()
    authority = secret.path("ca.crt")
    if authority:
        # Private CAs often lack fields that Python 3.13 requires beyond RFC 5280.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError as error:
            message = f"ca.crt of Secret {secret.name} is not a certificate: {error.reason}."
            raise SyncError("SecretInvalid", message, permanent=False) from error
    return context


def is_archive(key: str) -> bool:
    """Whether the key names an archive that is unpacked."""
    return key.lower().endswith(ARCHIVES)


def digest(objects: Iterable[BucketObject]) -> str:
    """Digest of the content of these objects: SHA-256 of keys, sizes and ETags."""
    lines = sorted(f"{o.key}\0{o.size}\0{o.etag}\n" for o in objects)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def list_prefix(
    bucket: Bucket, prefix: str, limits: ArchiveLimits
) -> list[tuple[PlannedPath, BucketObject]]:
    """The files below a prefix, checked. Raises ArchiveError, SyncError."""
    files: list[tuple[PlannedPath, BucketObject]] = []
    for one in bucket.list(prefix):
        if not one.key.startswith(prefix):
            raise ArchiveError("InvalidFile", f"Object {one.key!r} is not below {prefix!r}.")
        name = one.key.removeprefix(prefix)
        if name == "" or (name.endswith("/") and one.size == 0):
            continue  # consoles create folders this way
        path = components(name, limits)
        if name.endswith("/"):
            raise ArchiveError("InvalidFile", f"Object {name!r} is a folder with content.")
        files.append((PlannedPath(path, size=one.size), one))
        if len(files) > limits.entries:
            raise too_many(limits)
    if not files:
        message = (
            f"{bucket.endpoint.display_name} has no objects below {prefix!r}. Check the prefix."
        )
        raise SyncError("SourceNotFound", message, permanent=False)
    check_places([place for place, _ in files], limits)
    return files


def read_prefix(
    bucket: Bucket, files: list[tuple[PlannedPath, BucketObject]], tree: Path
) -> Manifest:
    """Write the tree. Raises ArchiveError, SyncError, OSError."""
    result = NewTree(tree)
    small = [pair for pair in files if pair[1].size <= _SMALL]
    with ThreadPoolExecutor(_THREADS) as pool:
        for batch in _batches(small):
            contents = pool.map(lambda pair: b"".join(bucket.pieces(pair[1])), batch)
            for (place, _), content in zip(batch, contents, strict=True):
                result.add_file(place, [content])
    for place, one in files:
        if one.size > _SMALL:
            result.add_file(place, bucket.pieces(one))
    return result.manifest


def _batches(
    pairs: list[tuple[PlannedPath, BucketObject]],
) -> Iterator[list[tuple[PlannedPath, BucketObject]]]:
    rest = iter(pairs)
    while batch := list(islice(rest, _BATCH)):
        yield batch


def read_archive(
    bucket: Bucket,
    archive: BucketObject,
    sub_path: str,
    work: Path,
    tree: Path,
    limits: ArchiveLimits,
) -> Manifest:
    """Unpack one archive, or a folder of it. Raises ArchiveError, SyncError, OSError."""
    if archive.size > limits.bytes:
        message = f"Object {archive.key!r} has {archive.size} bytes. The limit is {limits.bytes}."
        raise ArchiveError("WorkspaceTooLarge", message)
    download = work / "archive"
    with download.open("wb") as file:
        for piece in bucket.pieces(archive):
            file.write(piece)
    unpacked = work / "tree"
    unpack = extract if archive.key.lower().endswith(".zip") else extract_tar
    manifest = unpack(download, unpacked, limits)
    download.unlink()
    prefix = f"{sub_path}/" if sub_path else ""
    selected = [entry for entry in manifest.entries if entry.path.startswith(prefix)]
    if not selected:
        message = f"subPath {sub_path!a} is not a directory of {archive.key!r}."
        raise SyncError("SourceNotFound", message, permanent=False)
    (unpacked / sub_path).rename(tree)
    shutil.rmtree(unpacked, ignore_errors=True)
    return Manifest(entry._replace(path=entry.path.removeprefix(prefix)) for entry in selected)
