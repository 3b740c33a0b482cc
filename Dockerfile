# pdserve's images, one target each; build with BuildKit (docker buildx, buildah, podman):
#   docker build --target coordinator -t pdserve/coordinator:0.1.0 .
#   docker build --target worker-gpu  -t pdserve/worker-gpu:0.1.0 .
#   docker build --target worker-cpu  -t pdserve/worker-cpu:0.1.0 .
# Every package is pinned in requirements/ and installed without a resolver, as scripts/install does.
# No image holds a model, a key or a configuration: they are mounted.
#
# pip's cache is a mount that stays out of the images (DL3042), and steps that change at different
# times are layers of their own (DL3059).
# hadolint global ignore=DL3042,DL3059
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/pdserve/bin:$PATH
WORKDIR /src
RUN python -m venv /opt/pdserve
COPY requirements/ requirements/
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps -r requirements/coordinator.txt

FROM build AS wheel
COPY pyproject.toml ./
COPY pdserve/ pdserve/
COPY prefill_svc/ prefill_svc/
COPY decode_svc/ decode_svc/
COPY coordinator/ coordinator/
COPY cli/ cli/
COPY measure/ measure/
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM build AS build-coordinator
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl

# The packages, which change seldom and are big, come before pdserve itself, which is small.
FROM build AS build-worker-gpu
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps -r requirements/gpu.txt
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl

FROM build AS build-worker-cpu
# The CPU build of torch is not on every index: TORCH_INDEX may name one that has it.
ARG TORCH=2.13.0+cpu
ARG TORCH_INDEX
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$TORCH"
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps -r requirements/cpu.txt
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl

FROM ${PYTHON_IMAGE} AS runtime
# By number, so that Kubernetes can tell that it is not root; the manifests in k8s/ name it too.
RUN groupadd --gid 10001 pdserve && \
    useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin pdserve
ENV PATH=/opt/pdserve/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1
USER 10001:10001
WORKDIR /home/pdserve
ENTRYPOINT ["pdserve"]
CMD ["--help"]

FROM runtime AS worker-gpu
# Triton compiles its launchers while a model loads, and needs a C compiler for it. CUDA itself comes
# with the Python packages, the driver from the node.
USER 0
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install --yes --no-install-recommends gcc g++ libc6-dev && \
    rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-worker-gpu /opt/pdserve /opt/pdserve

FROM runtime AS worker-cpu
# libnuma is linked by vLLM's CPU kernels.
USER 0
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install --yes --no-install-recommends libnuma1 && \
    rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=build-worker-cpu /opt/pdserve /opt/pdserve

# Last, so that it is what a build without --target makes: the small one, without torch and vLLM.
FROM runtime AS coordinator
COPY --from=build-coordinator /opt/pdserve /opt/pdserve
