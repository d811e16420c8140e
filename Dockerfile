# vtserve in a container. docs/DOCKER.md says how to run it.
#
#   docker build -t vtserve .
#   docker build -t vtserve:cuda --build-arg EXTRAS=cuda .

ARG PYTHON_IMAGE=docker.io/library/python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# Extras of pyproject.toml, with commas between. Empty: the CPU device only.
# "cuda": NVRTC, for NVIDIA GPUs.
# "observe": CUPTI beside it, for VT_CUDA_ALLOC_OBSERVE.
# "export": what vtserve trace export writes for Perfetto and pprof.
ARG EXTRAS=
RUN python3 -m venv /opt/vtserve
WORKDIR /src
# What changes least comes first: dependencies are fetched again only when pyproject.toml changes.
COPY pyproject.toml README.md LICENSE ./
RUN mkdir app engine \
    && /opt/vtserve/bin/pip install --no-cache-dir ".${EXTRAS:+[$EXTRAS]}" \
    && /opt/vtserve/bin/pip uninstall --yes vtserve
COPY app app
COPY engine engine
# Then nothing of pip is left: the last stage has no tools to build or fetch with.
RUN /opt/vtserve/bin/pip install --no-cache-dir --no-deps . \
    && /opt/vtserve/bin/pip uninstall --yes pip setuptools \
    && find /opt/vtserve -name '*.pyc' -delete

FROM ${PYTHON_IMAGE}
# numba's threads run on it; no image of Python has it. PYTHON_IMAGE decides the distribution and its version of it:
# a version given here would be gone from the archive with the next security update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/*
# Numbers, as Kubernetes' runAsNonRoot takes no name for granted, and volumes are owned by numbers.
RUN groupadd --gid 10001 vtserve \
    && useradd --uid 10001 --gid 10001 --create-home --home-dir /home/vtserve vtserve \
    && install --directory --owner=10001 --group=10001 /cache
COPY --from=build /opt/vtserve /opt/vtserve
ENV PATH=/opt/vtserve/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    VTSERVE_CACHE=/cache/vtserve \
    HF_HOME=/cache/huggingface \
    NUMBA_CACHE_DIR=/cache/numba \
    XDG_STATE_HOME=/cache/state
USER 10001:10001
WORKDIR /home/vtserve
VOLUME /cache
EXPOSE 8000
# The engine may still be loading, or be starting again after a failure: that is not the container's death.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10m --retries=30 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["vtserve"]
CMD ["serve", "--host", "0.0.0.0"]
