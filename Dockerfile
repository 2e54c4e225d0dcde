# One image for the controller, for a job's sync pod, and for the launcher that workers copy out of it.
# No syntax of BuildKit's own: Docker, buildah and kaniko build it as it is.
# Best by its digest: --build-arg BASE=python:3.13-slim@sha256:...
ARG BASE=python:3.13-slim

FROM ${BASE} AS build
WORKDIR /src
COPY requirements/ requirements/
# Hashes for everything, the build tools too, so that nothing is resolved while building.
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --no-compile --require-hashes -r requirements/controller.txt \
 && python3 -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.txt \
 && python3 -m venv /opt/sbom \
 && /opt/sbom/bin/pip install --no-cache-dir --require-hashes -r requirements/sbom.txt
COPY pyproject.toml README.md LICENSE ./
COPY api/ api/
COPY controller/ controller/
COPY runtime/ runtime/
# Bytecode with hashes, not times, so that two builds are the same. The APIs and models of kubernetes_asyncio
# are not imported, and their bytecode would be a fifth of all.
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel . \
 && /opt/venv/bin/pip install --no-cache-dir --no-compile --no-deps --no-index /wheel/*.whl \
 && cp -r runtime/torchrun_runtime/launch /opt/launch \
 && find /opt/launch -type f ! -name '*.py' -delete \
 && /opt/venv/bin/pip uninstall --yes pip \
 && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
      --output-file /opt/sbom.cdx.json /opt/venv/bin/python \
 && find /opt/venv -name __pycache__ -prune -exec rm -r {} + \
 && /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash -x '/kubernetes_asyncio/client/(api|models)/' /opt/venv/lib

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="torchrun-controller" \
      org.opencontainers.image.description="Runs torchrun on many Kubernetes nodes without building an image for each edit" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# What sync pods fetch with; a BASE may have it already. ssh asks for a name of the user that it is.
RUN if ! command -v git || ! command -v ssh; then \
      apt-get update \
      && apt-get install -y --no-install-recommends ca-certificates git openssh-client \
      && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log; \
    fi \
 && echo 'torchrun:x:65532:65532::/tmp:/usr/sbin/nologin' >> /etc/passwd \
 && echo 'torchrun:x:65532:' >> /etc/group
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/launch /opt/torchrun/launch
# What of Python is in here. Debian's packages are listed by /var/lib/dpkg/status, as scanners know.
COPY --from=build /opt/sbom.cdx.json /opt/torchrun/sbom.cdx.json
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
USER 65532:65532
WORKDIR /
ENTRYPOINT []
CMD ["torchrun-controller"]
